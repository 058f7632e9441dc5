"""A few seconds of the load script: nothing is left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "load_serve.py"


def test_random_clients_leave_nothing_behind() -> None:
    words = [sys.executable, str(SCRIPT), "--seconds", "3", "--clients", "6"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "nothing is left behind" in done.stdout, done.stdout + done.stderr
