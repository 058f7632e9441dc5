"""A short form of scripts/fuzz, and that it sees the faults it looks for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.readers import READERS

ROOT = Path(__file__).resolve().parent.parent

PLANTED = """
import sys, time
from pathlib import Path
from tests.fuzz import isolated

isolated.CPU_SECONDS, isolated.WALL_SECONDS = 1, 5

def says(text, code):
    print(text, file=sys.stderr)
    return code

def takes_too_much():
    isolated.MOST_BYTES  # more than this
    return len(bytearray(isolated.MOST_BYTES + 1))

def spins():
    while True:
        pass

for action in (
    lambda: says("FileError: so it is", 4),
    lambda: says("FileError: so it is", 1),
    lambda: says("", 4),
    lambda: says("FileError: a\\nFileError: b", 4),
    lambda: says("thread 'main' panicked at lib.rs", 0),
    lambda: says("FileError: " + "x" * 10_000, 4),
    lambda: 1 // 0,
    takes_too_much,
    spins,
    lambda: time.sleep(60),
    lambda: 0,
):
    print(isolated.run_isolated(action, Path.cwd(), Path.cwd()).faults((0, 2, 3, 4, 5)))
"""
TRACEBACK = "['Traceback (most recent', 'exit code 99']"
SEEN = f"""\
[]
['exit code 1']
['0 messages']
['2 messages']
['panicked at']
['a message of 10012 characters']
{TRACEBACK}
{TRACEBACK}
['it did not end in time']
['it did not end in time']
[]
"""
READ_AS_ZEROS = """
import sys
from tests.fuzz import models
from tests.fuzz.__main__ import run

class Zeros(models.SafetensorsFile):
    def read(self, name, out):
        out[...] = 0

models.SafetensorsFile = Zeros
sys.exit(run())
"""


def run_python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)


def test_every_kind_of_fault_is_seen(tmp_path: Path) -> None:
    done = run_python(tmp_path, "-c", PLANTED)
    assert done.stdout == SEEN, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_is_read_wrongly_is_a_fault(tmp_path: Path) -> None:
    done = run_python(tmp_path, "-c", READ_AS_ZEROS, "25", "--reader", "safetensors", "--seed", "5")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "is read as other numbers than by the library" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_reader_fails_on_hostile_input(tmp_path: Path) -> None:
    done = run_python(tmp_path, "-m", "tests.fuzz", str(12 * len(READERS)), "--seed", "11")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(f"seed 11, cases {12 * len(READERS)}, faults 0\n")
    counts = {
        name: [int(count) for count in row.split()]
        for name, row in re.findall(r"^([a-z-]+)((?: +\d+)+)$", done.stdout, re.MULTILINE)
    }
    assert len(counts) == len(READERS) and all(sum(row) == 12 for row in counts.values()), counts
    assert all(row[0] < 12 for row in counts.values()), "a reader refused nothing"
    assert list(tmp_path.iterdir()) == []
