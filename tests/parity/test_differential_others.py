"""Random encoders, vision transformers and encoder-decoders, as transformers computed them
(`scripts/differential_others.py --store`).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpitp.comm import run_threads
from tests.parity.differential import differences
from tests.parity.differential_others import CASES, TYPES, computed, write_case

STORED = json.loads(CASES.read_text())


def test_every_type_is_among_them() -> None:
    assert {case["config"]["model_type"] for case in STORED} == set(TYPES)


@pytest.mark.parametrize("number", range(len(STORED)))
def test_nothing_differs(number: int, tmp_path: Path) -> None:
    case = STORED[number]
    write_case(tmp_path / "model", case)
    facts = (case["seed"], case["shapes"], case["image_size"])
    found = run_threads(case["ranks"], computed, tmp_path / "model", *facts)[0]
    assert differences(found, case["expected"]) == {}, case["config"]
