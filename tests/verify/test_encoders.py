"""`mpitp verify` of encoders and vision transformers: every layout equals one rank, and faults are placed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitp.cli import main
from mpitp.comm import Group, run_threads
from mpitp.layers.site import make_site
from mpitp.verify.batches import random_batch, with_edges
from mpitp.verify.command import default_tolerance
from mpitp.verify.run import Report, Settings, verify
from mpitp.verify.source import SourceArguments, source_of
from tests.command_on_threads import command_on_threads
from tests.train.run_case import write_run_file
from tests.train.test_encoder_tasks import MODEL, labelled
from tests.train.test_image_task import MODEL as IMAGE_MODEL
from tests.train.test_image_task import images

GOLDEN = Path(__file__).resolve().parent.parent / "parity"
MODELS = [*sorted((GOLDEN / "golden_encoders").iterdir()), *sorted((GOLDEN / "golden_vision").iterdir())]
MODELS = [path for path in MODELS if (path / "config.json").exists()]


CASES = [(path, 3) for path in MODELS] + [(path, n) for path in MODELS[-1:] + MODELS[1:2] for n in (2, 5)]


@pytest.mark.parametrize(("directory", "ranks"), CASES, ids=lambda value: getattr(value, "name", str(value)))
def test_every_rank_count_equals_one_rank(directory: Path, ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", str(directory), "--dtype", "float64", "--steps", "1", "--finite-differences", "3"]
    assert command_on_threads(ranks, "verify", *words, "--json") == [0] * ranks, capsys.readouterr().err
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and len(report["rows"]) > 100


@pytest.mark.parametrize("name", ["bert-masked", "bert-classification"])
def test_invariant_mode_is_equal_to_the_bit(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", str(GOLDEN / "golden_encoders" / name), "--invariant", "--json"]
    assert command_on_threads(3, "verify", *words) == [0] * 3, capsys.readouterr().err
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) > 100 and all(row["ok"] and row["largest_abs"] == 0 for row in rows)


def run_file(folder: Path, kind: str) -> str:
    """Four microbatches of a few samples each."""
    if kind == "image":
        np.savez(folder / "train.npz", **dict(zip(("images", "labels"), images(12, 1), strict=True)))
        model, data = dict(IMAGE_MODEL), {"train": str(folder / "train.npz")}
    else:
        (folder / "train.tsv").write_text(labelled(12, 1))
        model, data = dict(MODEL), {"train": str(folder / "train.tsv"), "tokenizer": "bytes", "seq_len": 16}
    train = {"steps": 1, "global_batch_size": 12, "micro_batch_size": 3, "run_dir": str(folder / "run")}
    tables: dict[str, Any] = {"model": model, "task": {"kind": kind}, "data": data, "train": train}
    return str(write_run_file(folder / "run.toml", tables))


LAYOUTS = {
    "replicas": ["mesh.dp=2", "optim.zero=0"],
    "ZeRO 2": ["mesh.dp=2", "optim.zero=2"],
    "ZeRO 3": ["mesh.dp=2", "optim.zero=3", 'train.recompute="full"'],
    "stages": ["mesh.pp=2", 'mesh.schedule="zb"'],
    "unequal shares": ["mesh.dp=2", "mesh.shares={dp=[1,2], tp=[2,1]}"],
    "sequences": ["mesh.cp=2"],
    "heads": ["mesh.cp=4", 'mesh.cp_form="heads"'],
    "token shards": ["mesh.pp=2", "mesh.sequence_parallel=true"],
}


@pytest.mark.parametrize("kind", ["classification", "image"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_equal_one_rank(kind: str, layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", run_file(tmp_path, kind), *(word for each in LAYOUTS[layout] for word in ("--set", each))]
    codes = command_on_threads(4, "verify", *words, "--dtype", "float64", "--steps", "2", "--failures-only")
    print(*capsys.readouterr(), sep="\n")
    assert codes == [0] * 4


def report_of(directory: Path, ranks: int, plant: Any) -> Report:
    """The comparison with a fault planted in the models of all ranks, but not in the oracle."""

    def run(group: Group) -> Report:
        source, make_batches = source_of(SourceArguments(str(directory), None, dtype="float64"))
        site = source.site(group, make_site(group).device)
        batch = with_edges(make_batches()[0], source.model.config, 0, ranks)

        def make(where: Any) -> Any:
            model = source.make(where)
            if where.ranks.size > 1:
                plant(model)
            return model

        return verify(site, make, [batch], Settings(default_tolerance("float64", is_exact=False)))

    return run_threads(ranks, run)[0]


def test_rows_of_another_rank_in_the_pooler_are_found() -> None:
    def plant(model: Any) -> None:
        model["head.pooler.dense"].product.weight.data[...] = 0

    first = report_of(GOLDEN / "golden_encoders" / "bert-classification", 3, plant).first("y")
    assert first is not None and first.name == "head.pooler.dense"


def test_a_positions_table_that_is_shifted_is_found() -> None:
    def plant(model: Any) -> None:
        table = model["tokens"].positions.data
        table[...] = np.roll(table, 1, axis=1)

    first = report_of(GOLDEN / "golden_vision" / "vit", 2, plant).first("y")
    assert first is not None and first.name == "tokens"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--layers", "0:1"], "an encoder is checked whole"),
        (["--seq", "999"], "exceeds the model's"),
        (["--against-reference", "x.npz"], "models that continue text"),
    ],
)
def test_what_encoders_do_not_have(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--model", str(GOLDEN / "golden_encoders" / "bert-masked"), *words]) == 2
    assert said in capsys.readouterr().err


def test_an_image_has_its_own_number_of_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--model", str(GOLDEN / "golden_vision" / "vit"), "--seq", "4"]) == 2
    assert "as many tokens as the model's patches" in capsys.readouterr().err


def test_types_need_no_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--types", "--model", str(GOLDEN / "golden_vision" / "vit"), "--ranks", "4096"]) == 0
    assert "head.classifier" in capsys.readouterr().out


def test_random_texts_have_unequal_lengths() -> None:
    source, _ = source_of(SourceArguments(str(GOLDEN / "golden_encoders" / "bert-masked"), None))
    batch = random_batch(source.model.config, 4, 8, 0)
    assert [run.length for run in batch.rows.runs] == [8, 7, 6, 5]
    assert batch.targets is not None and batch.num_targets == 13 and len(batch.targets) == 26
