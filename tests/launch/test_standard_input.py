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
from mpitp.errors import FileError
from mpitp.launch.standard_input import INPUT_OPTIONS, from_file
from tests.launch.test_launch_faults import MPIEXEC, environment, needs_mpiexec


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


def test_directory_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(b"a")))
    monkeypatch.setattr("tempfile.tempdir", f"{tmp_path}/none")
    with (
        pytest.raises(FileError, match=f"can't copy standard input to {tmp_path}/none"),
        from_file(["generate", "--prompts=-"]),
    ):
        pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_while_reading_leaves_nothing(tmp_path: Path, number: int) -> None:
    code = "from mpitp.launch.standard_input import from_file\nwith from_file(['generate', '--prompts', '-']): pass"
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


MPITP = f"{sys.executable} -m mpitp"


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """What bash makes of a command in a folder with a named pipe."""
    os.mkfifo(folder / "pipe")
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_pipes_are_copied_like_standard_input() -> None:
    first, second = (os.pipe() for _ in range(2))
    for (_, writing), text in ((first, b"one\n"), (second, b"two\n")):
        os.write(writing, text)
        os.close(writing)
    words = ["generate", "--prompts", f"/dev/fd/{first[0]}", f"--prompts=/proc/self/fd/{second[0]}", "--prompt=/dev/x"]
    with from_file(words) as given:
        assert [given[0], given[1], given[4]] == ["generate", "--prompts", "--prompt=/dev/x"]
        assert Path(given[2]).read_bytes() == b"one\n"
        assert Path(given[3].removeprefix("--prompts=")).read_bytes() == b"two\n"
    assert not Path(given[2]).exists()


@pytest.mark.parametrize("word", ["/dev/fd/63", "--config=/dev/fd/63", "/proc/self/fd/9", "/dev/stdin"])
def test_what_ranks_could_not_open_is_refused_once(word: str) -> None:
    with pytest.raises(FileError, match="is open in this process only"), from_file(["train", word]):
        pass


@needs_mpiexec
@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("launch -n 2 -- generate --model none --prompts <(printf 'a\\nb\\n')", 4, "none does"),
        ("launch -n 2 -- train <(cat run.toml)", 4, "/dev/fd/63 is open in this process only"),
        ("launch -n 2 -- train pipe", 3, "pipe is a pipe, expected a regular file"),
        ("launch -n 2 -- generate --model none --prompts pipe", 4, "pipe is a pipe, expected a regular file"),
    ],
)
def test_inputs_that_can_be_read_once(tmp_path: Path, command: str, code: int, said: str) -> None:
    result = shell(f"{MPITP} {command}", tmp_path)
    assert (result.returncode, result.stderr.count("Error: ")) == (code, 1), result.stderr
    assert said in result.stderr


@needs_mpiexec
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("train <(cat run.toml)", 3, "the run file"),
        ("train pipe", 3, "pipe is a pipe"),
        ("generate --model none --prompts <(printf 'a\\nb\\n')", 4, ""),
        ("generate --model none --prompts pipe", 4, "pipe is a pipe"),
    ],
)
def test_the_same_under_an_mpiexec(tmp_path: Path, words: str, code: int, said: str) -> None:
    (tmp_path / "run.toml").write_text("[train]\n")  # mpiexec counts a cat that fails as a process of its own
    result = shell(f"{MPIEXEC} -n 2 {MPITP} {words}", tmp_path)
    assert (result.returncode, result.stderr.count("Error: ")) == (code, 1), result.stderr
    assert said in result.stderr
