"""Invariant mode: fifty optimizer steps are equal to the last bit at every rank count; what can't be cut is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpitp.cli import main
from mpitp.comm import Group, run_threads
from mpitp.layers.site import make_site
from mpitp.models import new_model
from tests.command_on_threads import command_on_threads
from tests.models.model_cases import GPT2
from tests.sharded import assert_same_bits
from tests.train.invariant_case import CONFIGS, STEPS, on_one_rank, train_and_generate

ROOT = Path(__file__).resolve().parents[2]
RANKS = [2, 3, 4, 5, 6]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", CONFIGS)
def test_fifty_steps_and_two_texts(name: str, ranks: int) -> None:
    expected = on_one_rank(name)
    for found in run_threads(ranks, train_and_generate, name):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_fifty_steps_have_something_to_say(name: str) -> None:
    """The models learn, dropout and all, and the two texts differ."""
    result = on_one_rank(name)
    assert len(set(result["losses"])) == STEPS
    assert result["losses"][-5:].mean() < result["losses"][:5].mean() - 0.5
    assert (result["greedy"] != result["sampled"]).any()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run file with its text, 6 heads, 37 FFN columns, 257 tokens; and the model that a run of two steps leaves."""
    folder = tmp_path_factory.mktemp("invariant")
    (folder / "text").write_text("To be, or not to be, that is the question. " * 20)
    assert main(["data", "prepare", str(folder / "text"), "--tokenizer", "bytes", "--out", str(folder / "data")]) == 0
    fields = "\n".join(f"{k} = {json.dumps(v)}" for k, v in GPT2.items() if k not in ("vocab_size", "eos_token_id"))
    data = f'[data]\ntrain = "{folder}/data"\nseq_len = 8\n'
    train = "[train]\nsteps = 2\nglobal_batch_size = 2\nmicro_batch_size = 2\ninvariant = true\noverwrite = true\n"
    (folder / "run.toml").write_text(f'[model]\n{fields}\n{data}{train}run_dir = "{folder}/run"\n')
    assert main(["train", str(folder / "run.toml")]) == 0
    yield folder


def test_train_verb_writes_the_same_files_at_every_rank_count(folder: Path) -> None:
    files = {}
    for ranks in (1, 2, 3, 4, 6):
        assert command_on_threads(ranks, "train", str(folder / "run.toml")) == [0] * ranks
        metrics = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
        numbers = [(m["step"], m["loss"], m["grad_norm"]) for m in metrics]
        files[ranks] = (numbers, (folder / "run/model/model.safetensors").read_bytes())
    assert all(written == files[1] for written in files.values())


@pytest.mark.parametrize("words", [(), ("--temperature", "1.5", "--seed", "4")])
def test_generate_verb_says_the_same_at_every_rank_count(
    folder: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    command = (
        "generate",
        "--model",
        str(folder / "run/model"),
        "--prompt",
        "To",
        "--invariant",
        "--max-new-tokens",
        "9",
    )
    said = set()
    for ranks in (1, 2, 3, 5):
        assert command_on_threads(ranks, *command, "--max-new-tokens", "9", *words) == [0] * ranks
        said.add(capsys.readouterr().out)
    assert len(said) == 1 and said.pop().startswith("To")


REFUSED = [
    (1, 7, "invariant_blocks=7 exceeds n_head=6: .* use a number from 1 to 6"),
    (3, 2, "2 blocks can't go to 3 ranks; use at most 2 ranks or set invariant_blocks to a number up to 6"),
    (3, 999, "invariant_blocks=999 exceeds n_head=6: .* use a number from 3 to 6"),
    (7, 0, "6 blocks can't go to 7 ranks; use at most 6 ranks"),
    (7, 7, "at most 6 blocks .* fewer than the 7 ranks; use at most 6 ranks"),
]


@pytest.mark.parametrize(("ranks", "blocks", "message"), REFUSED)
@pytest.mark.parametrize("verb", ["train", "generate", "verify"])
def test_what_cannot_be_cut_is_refused(
    folder: Path, verb: str, ranks: int, blocks: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {
        "train": ("train", str(folder / "run.toml"), "--set", f"train.invariant_blocks={blocks}"),
        "generate": ("generate", "--model", str(folder / "run/model"), "--prompt", "a", "--invariant"),
        "verify": ("verify", "--model", str(folder / "run/model"), "--invariant"),
    }[verb]
    words += () if verb == "train" else ("--invariant-blocks", str(blocks))
    assert command_on_threads(ranks, *words) == [3] * ranks
    printed = capsys.readouterr()
    assert printed.out == "" and "Traceback" not in printed.err
    lines = printed.err.splitlines()
    assert len(lines) == ranks and len(set(lines)) == 1  # threads speak each for itself; of processes, one does
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(lines[0])


def test_refusal_is_said_once_by_processes(folder: Path) -> None:
    command = [sys.executable, "-m", "mpitp", "launch", "-n", "3", "--", "verify", "--model", str(folder / "run/model")]
    command += ["--invariant", "--invariant-blocks", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 3 and done.stdout == ""
    assert done.stderr.count("ConfigError: invariant mode deals whole blocks") == 1


def test_suggested_sizes_work(folder: Path) -> None:
    def build(group: Group, blocks: int) -> None:
        new_model(CONFIGS["gpt2"], make_site(group, invariant_blocks=blocks), seed=1)

    for ranks, blocks in ((1, 6), (2, 2), (3, 3), (3, 6), (6, 6)):
        run_threads(ranks, build, blocks)
