"""scripts/test_summary.py: what counts as failed, and what ran a second time and is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "test_summary.py"


def write(file: Path, **outcomes: str) -> None:
    file.parent.mkdir(exist_ok=True)
    tags = {"passed": "", "failed": "<failure/>", "skipped": "<skipped/>"}
    cases = [
        f'<testcase classname="tests.a" name="{name}">{tags[outcome]}</testcase>' for name, outcome in outcomes.items()
    ]
    file.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")


def summary(results: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, SCRIPT, results, "mpich", "--", "1"], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


@pytest.fixture
def results(tmp_path: Path) -> Path:
    write(tmp_path / "serial.xml", one="passed", two="failed", three="skipped")
    write(tmp_path / "mpich-1" / "rank0.xml", four="passed")
    return tmp_path


def test_failure_is_one(results: Path) -> None:
    code, out = summary(results)
    assert code == 1 and "1 passed, 1 failed, 1 skipped" in out and "2 passed, 1 failed, 1 skipped" in out
    assert "FAILED AT FIRST" not in out


def test_passed_alone_is_told(results: Path) -> None:
    write(results / "alone.xml", two="passed")
    code, out = summary(results)
    assert code == 0 and "3 passed, 0 failed, 1 skipped" in out
    assert "FAILED AT FIRST and passed when run once more: tests.a::two" in out


def test_failed_alone_too(results: Path) -> None:
    write(results / "alone.xml", two="failed")
    code, out = summary(results)
    assert code == 1 and "2 passed, 1 failed, 1 skipped" in out and "FAILED AT FIRST" not in out


def test_mpi_run_that_passed_the_second_time_is_told(results: Path) -> None:
    write(results / "serial.xml", one="passed")
    write(results / "mpich-1.first" / "rank0.xml", four="failed")
    code, out = summary(results)
    assert code == 0 and "once more: the MPI tests, mpich on 1" in out


@pytest.mark.parametrize("text", ["", "<testsuites>"])
def test_broken_run_is_a_failure(results: Path, text: str) -> None:
    (results / "serial.xml").write_text(text)
    assert summary(results)[0] == 1
