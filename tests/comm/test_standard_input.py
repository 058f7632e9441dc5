from __future__ import annotations

import argparse
import os
import signal
import stat
import subprocess
import sys
import time
from importlib import import_module
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest

from mpitp import cli
from mpitp.comm.standard_input import INPUT_OPTIONS, from_file
from mpitp.errors import FileError
from tests.comm.test_launch_faults import environment


@pytest.mark.parametrize(
    ("words", "place", "before"),
    [(["--prompts", "-"], 3, ""), (["--json", "--prompts=-", "--seed", "1"], 3, "--prompts=")],
)
def test_dash_becomes_a_private_file_that_goes(
    monkeypatch: pytest.MonkeyPatch, words: list[str], place: int, before: str
) -> None:
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(b"a\n\xff\x00")))
    words = ["generate", "--json", *words] if before == "" else ["generate", "-x", *words]
    with from_file(words) as new:
        assert [word for word in new if "standard-input" not in word] == [w for w in words if not w.endswith("-")]
        (word,) = [word for word in new if "standard-input" in word]
        path = Path(word.removeprefix(before))
        assert path.read_bytes() == b"a\n\xff\x00"
        assert not stat.S_IMODE(path.parent.stat().st_mode) & 0o077
    assert not path.parent.exists()


def test_every_dash_becomes_the_same_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(b"a\n")))
    with from_file(["generate", "--prompts", "-", "--prompts=-", "--prompt", "-", "--prompts", "-"]) as new:
        path = new[2]
        assert new == ["generate", "--prompts", path, f"--prompts={path}", "--prompt", "-", "--prompts", path]
        assert Path(path).read_bytes() == b"a\n"


@pytest.mark.parametrize("words", [["doctor"], ["generate", "--prompts", "file"], ["generate", "--prompt", "-"]])
def test_input_that_is_not_asked_for_is_left(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with from_file(words) as new:
        assert new == words


def test_closed_input_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(FileError, match="standard input: it is closed"), from_file(["generate", "--prompts", "-"]):
        pass


def test_directory_that_cannot_be_written_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(b"a")))
    monkeypatch.setattr("tempfile.tempdir", "/proc/none")
    with (
        pytest.raises(FileError, match="can't copy standard input to /proc/none"),
        from_file(["generate", "--prompts=-"]),
    ):
        pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_while_reading_leaves_nothing(tmp_path: Path, number: int) -> None:
    code = "from mpitp.comm.standard_input import from_file\nwith from_file(['generate', '--prompts', '-']): pass"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment(TMPDIR=str(tmp_path)),
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    end = time.monotonic() + 20
    while not list(tmp_path.glob("mpitp-*/standard-input")) and time.monotonic() < end:
        time.sleep(0.01)
    os.kill(process.pid, number)
    process.communicate(timeout=20)
    assert process.returncode != 0
    assert list(tmp_path.iterdir()) == []


def test_every_option_that_takes_a_dash_is_known() -> None:
    for verb, (module, _) in cli.VERBS.items():
        parser = argparse.ArgumentParser()
        import_module(module).add_arguments(parser)
        told = [action for action in parser._actions if "standard input" in (action.help or "")]
        assert tuple(action.option_strings[0] for action in told) == INPUT_OPTIONS.get(verb, ())
