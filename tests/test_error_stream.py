"""Standard error and output that are closed or full: the work goes on, or ends with one message."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mpitp.error_stream import ErrorStream

TEXT = "a line of text\n" * 50
PREPARE = f"{sys.executable} -m mpitp data prepare text.txt --tokenizer bytes --out data --overwrite"


def shell(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", line], cwd=folder, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-", "<&- 2>&-", ">&- 2>&-"])
def test_work_goes_on_without_standard_error(tmp_path: Path, redirection: str) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    assert shell(f"{PREPARE} {redirection}", tmp_path).returncode == 0
    assert (tmp_path / "data" / "tokens.bin").stat().st_size > len(TEXT)


def test_a_bar_is_lost_but_not_a_reader_that_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        error: type[OSError] = OSError

        def write(self, text: str) -> int:
            raise self.error

        flush = write

    stream = Broken()
    monkeypatch.setattr(sys, "stderr", stream)
    assert ErrorStream().write("lost") == 4
    stream.error = BrokenPipeError
    with pytest.raises(BrokenPipeError):
        ErrorStream().write("unread")


@pytest.mark.parametrize("words", ["--version", "--help", "launch -n 2 -- --help", "doctor"])
def test_output_that_is_full_ends_with_one_message(tmp_path: Path, words: str) -> None:
    ended = shell(f"{sys.executable} -m mpitp {words} >/dev/full", tmp_path)
    assert ended.returncode == 4
    assert ended.stderr.strip() == "FileError: can't write to standard output: No space left on device"


def test_closed_standard_input_holds_no_prompts(tmp_path: Path) -> None:
    ended = shell(f"{sys.executable} -m mpitp generate --model nowhere --prompts - <&-", tmp_path)
    assert ended.returncode == 4
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("redirection", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_no_file_takes_the_number_of_a_closed_stream(tmp_path: Path, redirection: str) -> None:
    code = (
        "import os; from mpitp import cli; cli.main(['--version']); "
        "opened = os.open('out.txt', os.O_CREAT | os.O_WRONLY); assert opened > 2; os.write(opened, b'whole')"
    )
    shell(f'{sys.executable} -c "{code}" {redirection}', tmp_path)
    assert (tmp_path / "out.txt").read_text() == "whole"


def test_sizes_beyond_the_memory_end_with_one_message(tmp_path: Path) -> None:
    words = "bench train --layers 1 --hidden 240000 --heads 3 --vocab 2000000000 --batch 1 --seq 4 --steps 2"
    ended = shell(f"{sys.executable} -m mpitp {words}", tmp_path)
    assert ended.returncode == 3
    assert "MemoryError: Unable to allocate" in ended.stderr and "Traceback" not in ended.stderr
