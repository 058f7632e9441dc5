"""Compiled kernels that are loaded behind the first token: when, and that the text stays the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpitp.comm import SerialGroup
from mpitp.infer.late_kernels import MOST_ROWS, is_late
from tests.convert.test_rounding import save

pytest.importorskip("numba")

PROGRAM = """
import sys
from mpitp.cli import main
code = main(sys.argv[1:])
print(code, "numba" in sys.modules, file=sys.stderr)
"""


def test_one_process_with_short_prompts_alone_waits():
    two = SerialGroup()
    two.size = 2
    short, long = [[1] * 20, [2] * (MOST_ROWS - 20)], [[1] * 20, [2] * (MOST_ROWS - 19)]
    assert is_late(SerialGroup(), short, invariant=False) and not is_late(SerialGroup(), long, invariant=False)
    assert not is_late(SerialGroup(), short, invariant=True) and not is_late(two, short, invariant=False)


def test_when_numba_is_imported(tmp_path: Path) -> None:
    """By whoever writes a second token, or begins with the kernels; the tokens are those that plain NumPy chooses."""
    directory, texts = save(tmp_path / "model"), []
    for options, setting, imports in (
        (["--max-new-tokens", "1"], "auto", False),
        (["--max-new-tokens", "6"], "auto", True),
        (["--max-new-tokens", "6"], "off", False),
        (["--max-new-tokens", "1", "--invariant"], "auto", True),
    ):
        words = ["generate", "--model", str(directory), "--prompt", "A bridge", "--ignore-eos", "--json", *options]
        environment = {**os.environ, "MPITP_ACCELERATOR": setting}
        ran = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, env=environment)
        assert ran.stderr.endswith(f"0 {imports}\n"), ran.stderr
        texts.append(json.loads(ran.stdout)["tokens"])
    assert texts[1] == texts[2] and texts[0] == texts[3] == texts[1][:1]


def test_an_unknown_choice_is_refused_all_the_same(tmp_path: Path) -> None:
    words = ["generate", "--model", str(tmp_path), "--prompt", "A"]
    environment = {**os.environ, "MPITP_ACCELERATOR": "fast"}
    ran = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, env=environment)
    assert "MPITP_ACCELERATOR='fast' is unknown" in ran.stderr
