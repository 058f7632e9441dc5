"""A few seconds of the scripts that let clients loose on a server: nothing is left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.mark.parametrize(
    ("script", "options"), [("load_serve.py", ("--clients", "6")), ("hostile_serve.py", ("--connections", "150"))]
)
def test_random_clients_leave_nothing_behind(script: str, options: tuple[str, ...]) -> None:
    words = [sys.executable, str(SCRIPTS / script), "--seconds", "3", *options]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "nothing is left behind" in done.stdout, done.stdout + done.stderr


def test_bodies_of_the_servers_own_page_get_fitting_answers() -> None:
    words = [sys.executable, str(SCRIPTS / "fuzz_serve.py"), "--examples", "40"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "completions 200" in done.stdout, done.stdout + done.stderr
