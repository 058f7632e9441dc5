"""Random decoders of every type, as transformers computed them (`scripts/differential.py --store`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpitp.comm import run_threads
from mpitp.models import MODEL_TYPES
from tests.parity.differential import CASES, computed, differences, write_directory

STORED = json.loads(CASES.read_text())


def test_every_type_is_among_them() -> None:
    assert {case["config"]["model_type"] for case in STORED} == set(MODEL_TYPES)


@pytest.mark.parametrize("number", range(len(STORED)))
def test_nothing_differs(number: int, tmp_path: Path) -> None:
    case = STORED[number]
    write_directory(tmp_path / "model", case["config"], case["shapes"])
    found = run_threads(case["ranks"], computed, tmp_path / "model", case["seed"], case["shapes"])[0]
    assert differences(found, case["expected"]) == {}, case["config"]
