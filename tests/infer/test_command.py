"""What `mpitp generate` says when standard output doesn't take its text."""

from __future__ import annotations

import argparse
import errno
import io
import sys

import pytest

from mpitp.data.tokenizer import byte_tokenizer
from mpitp.errors import FileError
from mpitp.infer.command import Printer
from mpitp.infer.generate import Completion


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("stdout", "words"),
    [
        (None, "standard output: it is closed"),
        (FullDisk(), "standard output: No space left on device"),
        (io.TextIOWrapper(io.BytesIO(), encoding="ascii"), r"'\\u6f22' to standard output, whose encoding is ascii.*"),
    ],
    ids=["closed", "full", "ascii"],
)
def test_standard_output_that_takes_no_text(monkeypatch: pytest.MonkeyPatch, stdout: object, words: str) -> None:
    args = argparse.Namespace(json=False, no_echo=False, stream=False)
    printer = Printer(args, byte_tokenizer(), ["漢"], is_speaker=True)
    monkeypatch.setattr(sys, "stdout", stdout)
    with pytest.raises(FileError, match=f"can't write.*{words}"):
        printer.end([Completion([65], "length")])
    monkeypatch.undo()
