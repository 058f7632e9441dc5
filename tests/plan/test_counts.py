"""Absurd numbers and places on the command lines of plans: one message each, before anything is computed or printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpitp.cli import main
from mpitp.errors import ConfigError
from mpitp.plan.counts import MOST_RANKS, count_in, shown
from mpitp.plan.machine_file import machine_from
from tests.plan.cases import LLAMA
from tests.plan.test_machine_file import changed

MACHINE = Path(__file__).parents[2] / "examples" / "machines" / "ethernet_cpu.toml"
LONG = "9" * 4000  # digits; Python reads some more as a number


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    lines = ["[model]", *(f"{key} = {json.dumps(value)}" for key, value in LLAMA.items())]
    lines += ["[data]", 'train = "none"', "seq_len = 16"]
    lines += ["[train]", "steps = 1", 'run_dir = "none"', "global_batch_size = 8"]
    path = tmp_path / "run.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("search RUN --machine MACHINE --ranks 1048577", "is no number from 1 to 2^20"),
        (f"search RUN --machine MACHINE --ranks {LONG}", "is no number from 1 to 2^20"),
        ("search RUN --machine MACHINE --ranks 2 --compare tp=\u00b2", "is no value of tp"),
        (f"search RUN --machine MACHINE --ranks 2 --compare micro={LONG}9999", "is no value of micro"),
        ("search RUN --machine MACHINE --ranks 2 --job /nowhere/job", "can't write the job to /nowhere/job"),
        ("simulate RUN --machine MACHINE --ranks 1000000000", "--ranks 1000000000: expected at most 1,048,576"),
        (f"simulate RUN --machine MACHINE --ranks 2 --steps {LONG}", "--steps (a number of 13288 bits): expected"),
        (f"simulate RUN --machine MACHINE --ranks 2 --save-every {LONG}", "--save-every (a number of"),
        ("simulate RUN --machine MACHINE --ranks 2 --trace /nowhere/t.json", "can't write the trace to /nowhere/"),
        ("simulate RUN --machine MACHINE --ranks 2 --plot /nowhere/p.svg", "can't write the plot to /nowhere/"),
        ("memory RUN --ranks 1000000000000", "--ranks 1000000000000: expected at most 1,048,576"),
        ("memory RUN --ranks -1", "--ranks must be at least 1, got -1"),
        ("graph --config RUN --ranks 2 --mesh tp=\u00b2", "expected ranks along the axes"),
        (f"graph --config RUN --ranks 2 --mesh tp={LONG}9999", "expected ranks along the axes"),
        ("graph --config RUN --ranks 2 --out /nowhere/g.svg", "can't draw to /nowhere/g.svg: /nowhere doesn't exist"),
    ],
    ids=lambda text: text[:60],
)
def test_told_at_once(words: str, told: str, run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled = {"RUN": str(run_file), "MACHINE": str(MACHINE)}
    try:
        code = main(["plan", *(filled.get(word, word) for word in words.split())])
    except SystemExit as error:  # of argparse
        code = int(error.code or 0)
    found = capsys.readouterr()
    assert (code in (2, 4), found.out) == (True, "")
    assert told in found.err
    assert [path.name for path in run_file.parent.iterdir()] == ["run.toml"]


def test_numbers_in_words() -> None:
    assert [count_in(text, 50) for text in ("50", "51", "0", "-1", "1.0", "", "\u0663", "9" * 5000)] == [50] + [0] * 7
    assert count_in(str(MOST_RANKS), MOST_RANKS) == MOST_RANKS
    assert shown(-5) == "-5" and shown(-(10**40)) == "-(a number of 133 bits)"


def test_a_machine_s_name_is_a_line() -> None:
    """It is written into job files, as a comment."""
    with pytest.raises(
        ConfigError, match="(?s)machine.name = .*: expected a string of one line of printable characters"
    ):
        machine_from(changed("machine.name", "nodes\nrm -rf data"))
