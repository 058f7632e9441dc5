"""The operator graph of encoders and vision transformers against what runs on thread ranks count and hand over."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitp.cli import main
from mpitp.comm import Group, run_threads
from mpitp.comm.mesh import abstract_mesh, make_mesh
from mpitp.config import RunConfig
from mpitp.layers.rows import Rows
from mpitp.layers.site import Site, make_site
from mpitp.models import Batch
from mpitp.models.encoder_config import CLASSIFICATION
from mpitp.models.encoders import abstract_encoder, build_encoder, encoder_config_from_hf
from mpitp.models.layered import LayeredModel
from mpitp.models.registry import recompute_blocks
from mpitp.models.vision import abstract_vision, build_vision
from mpitp.models.vision_config import vision_config_from_hf
from mpitp.plan.graph import rank_graph
from mpitp.plan.graph_models import config_of
from mpitp.plan.kept import Sizes, kept_of_chunk
from mpitp.plan.step_graph import step_graph
from mpitp.trace.ledger import LedgerRow
from tests.plan.handed_over import by_graph, by_trace
from tests.sharded import fill
from tests.trace.test_axes import traced_run
from tests.train.kinds_case import MODELS, settings_of

LENGTH = 131  # more than one tile of scores
CLASSES = tuple("abcde")
SIZES = {"hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 2, "intermediate_size": 70}
BERT = {"model_type": "bert", **SIZES, "max_position_embeddings": 140, "vocab_size": 101}
IMAGES = {**SIZES, "image_size": 24, "patch_size": 2, "num_channels": 1}
KINDS: dict[str, dict[str, Any]] = {
    "masked": {**BERT, "architectures": ["BertForMaskedLM"]},
    "classes": {**BERT, "model_type": "roberta", "architectures": ["RobertaModel"]},
    "vit": {"model_type": "vit", **IMAGES},
    "dinov2": {"model_type": "dinov2", **IMAGES},
}


def _made(kind: str) -> tuple[Callable[[Site], LayeredModel], Callable[[Site], LayeredModel], int]:
    """(what builds the model, the same without memory, tokens of a text or an image)."""
    if "image_size" in KINDS[kind]:
        vision = vision_config_from_hf(KINDS[kind]).with_head(CLASSIFICATION, CLASSES)
        length = 1 + vision.grid[0] * vision.grid[1]
        return (lambda site: build_vision(vision, site)), (lambda site: abstract_vision(vision, site)), length
    own = encoder_config_from_hf(KINDS[kind])
    config = own if kind == "masked" else own.with_head(CLASSIFICATION, CLASSES)
    return (lambda site: build_encoder(config, site)), (lambda site: abstract_encoder(config, site)), LENGTH


def _batch(kind: str, length: int) -> Batch:
    rows = Rows.of((length, length))
    if "image_size" in KINDS[kind]:
        return Batch(np.ones((2 * (length - 1), 4)), rows, np.arange(2))
    return Batch(np.arange(2 * length) % 101, rows, np.arange(2 * length if kind == "masked" else 2) % 5)


COUNTED: list[tuple[str, dict[str, int], dict[str, Any], str]] = [
    *((kind, {"tp": 2}, {}, "none") for kind in KINDS),
    *((kind, {"tp": 2}, {"sequence_parallel": True}, "full") for kind in KINDS),
    *((kind, {"cp": 2, "tp": 1}, {}, "none") for kind in ("masked", "classes", "vit")),
]


@pytest.mark.parametrize(("kind", "mesh", "options", "recompute"), COUNTED, ids=str)
def test_flops_are_those_of_the_products_that_a_run_computes(
    kind: str, mesh: dict[str, int], options: dict[str, Any], recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all but the patches', and those forward of a few rows, which are other products of NumPy."""
    (build, abstract, length), counts = _made(kind), []
    matmul, ranks = np.matmul, int(np.prod(list(mesh.values())))

    def counting(a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
        if np.ndim(b) == 2 and b.shape[1] > 1:
            counts.append(2 * np.size(a) * b.shape[1])
        return matmul(a, b, *args, **kwargs)

    def rank(group: Group) -> None:
        model = recompute_blocks(build(make_site(make_mesh(group, mesh), **options)), recompute)
        fill(model.named_params(), std=0.1)
        cp = model.site.mesh["cp"]
        _, ctx = model.loss_forward(_batch(kind, length).cut(cp.rank, cp.size))
        model.loss_backward(ctx, 1.0)

    monkeypatch.setattr(np, "matmul", counting)
    run_threads(ranks, rank)
    expected = 0
    for each in range(ranks):
        model = recompute_blocks(abstract(make_site(abstract_mesh(mesh, each), **options)), recompute)
        nodes = rank_graph(model, Rows.of((length, length))).operations
        few = [node for node in nodes if node.shape[0] == 2 and node.phase == "forward"]
        expected += sum(node.flops * node.passes for node in nodes if node.layer != "patches" and node not in few)
    assert sum(counts) == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}], ids=str)
def test_kept_bytes_are_those_of_the_memory_plan(kind: str, recompute: str, options: dict[str, Any]) -> None:
    _, abstract, length = _made(kind)
    model = recompute_blocks(abstract(make_site(abstract_mesh({"tp": 3}), **options)), recompute)
    rows = Rows.of((length, length))
    kept = kept_of_chunk(model, model.chunks[0], Sizes.of(rows, model.site, 48))
    assert rank_graph(model, rows).kept_bytes() == kept


def test_products_of_patches_and_of_what_is_said_of_an_image() -> None:
    """3 images of 12 x 12 patches: pixels have no gradient; behind the pooling each image is a row."""
    _, abstract, length = _made("dinov2")
    graph = rank_graph(abstract(make_site(abstract_mesh({"tp": 2}))), Rows.of((length,) * 3))
    flops = {node.name: node.flops for node in graph.operations}
    assert flops["patches"] == flops["patches backward"] == 2 * (3 * 144) * 24 * 4
    assert flops["head"] == 2 * 3 * 3 * 96  # of five classes
    assert str(graph.nodes["pooling"].output) == "[3, 96] tp:I"
    assert str(graph.nodes["patches all_gather forward"].output) == "[435, 48] tp:R"
    assert str(graph.nodes["pooling backward"].output) == "[435, 48] tp:I"


@pytest.mark.parametrize("kind", KINDS)
def test_every_node_takes_what_was_made_before_it(kind: str) -> None:
    """Two branches meet what went past them, in post-norm blocks too, and each is used once."""
    _, abstract, length = _made(kind)
    graph = rank_graph(abstract(make_site(abstract_mesh({"tp": 2}), sequence_parallel=True)), Rows.of((length,)))
    seen: set[str] = set()
    for node in graph.nodes.values():
        assert seen.issuperset(node.inputs), node
        assert node.inputs or node.name in ("embedding", "patches", "loss backward")
        seen.add(node.name)
    joins = {node.name: node.inputs for node in graph.operations if node.kind == "residual" and "back" not in node.name}
    assert {len(inputs) for inputs in joins.values()} == {2}
    assert ("blocks.1.norm1" in joins["blocks.1.residual2"]) == (kind in ("masked", "classes"))


LAYOUTS: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    ("bert", 3, {"tp": 3}, {}),
    ("bert", 4, {"tp": 2, "pp": 2, "sequence_parallel": True}, {"train_recompute": "full"}),
    ("bert", 2, {"cp": 2, "tp": 1}, {}),
    ("roberta", 4, {"tp": 2, "dp": 2, "sequence_parallel": True}, {"optim_zero": 1}),
    ("distilbert", 4, {"pp": 2, "tp": 2}, {}),
    ("vit", 3, {"tp": 3, "sequence_parallel": True}, {}),
    ("vit", 4, {"pp": 2, "tp": 2}, {"train_recompute": "every:2"}),
    ("dinov2", 4, {"tp": 2, "dp": 2, "sequence_parallel": True}, {"optim_zero": 2}),
]

FIRST_ROWS = {("head", "roberta"), ("head", "vit")}  # places that gather them


def _config(model: str, mesh: dict[str, Any], keys: dict[str, Any], folder: Path) -> RunConfig:
    """A step without held-out data; every text is longer than what is read of it."""
    same = {"train_steps": 1, "data_valid": None, "train_eval_every": 0, **keys}
    if model in ("roberta", "distilbert"):
        lines = [f"{'abc'[i % 3]}\t{'abcd' * 4}\n" for i in range(12)]
        (folder / "train.tsv").write_text("".join(lines))
        same["data_train"] = str(folder / "train.tsv")
    if model not in ("vit", "dinov2"):
        same["data_seq_len"] = 8
    return settings_of(model, same, mesh, folder / "run")


@pytest.mark.parametrize(("model", "ranks", "mesh", "keys"), LAYOUTS, ids=str)
def test_bytes_are_those_that_a_traced_run_hands_over(
    model: str, ranks: int, mesh: dict[str, Any], keys: dict[str, Any], tmp_path: Path
) -> None:
    """On the first rank of each stage along every axis; the mean along tp of first rows, which lie on some."""
    config = _config(model, mesh, keys, tmp_path)
    trace, graph = traced_run(ranks, config, tmp_path), step_graph(config, config_of(config), ranks)
    in_stage, tp = ranks // graph.sizes["pp"], graph.sizes["tp"]
    for stage in graph.stages:
        begin = stage.stage * in_stage

        def ranks_of(row: LedgerRow, begin: int = begin) -> range:
            return range(begin, begin + (tp if (row.place, model) in FIRST_ROWS else 1))

        assert by_graph(stage) == by_trace(trace, ranks_of)


@pytest.mark.parametrize("kind", ["bert", "vit"])
@pytest.mark.parametrize("form", ["text", "json", "svg"])
def test_a_directory_is_drawn(kind: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without its data; one that gives features alone has a head of two classes."""
    fields = {**MODELS[kind], **({"vocab_size": 101} if kind == "bert" else {})}
    (tmp_path / "config.json").write_text(
        json.dumps({**fields, "architectures": [{"bert": "BertModel", "vit": "ViTModel"}[kind]]})
    )
    words = ["plan", "graph", "--model", str(tmp_path), "--ranks", "12", "--mesh", "tp=3,pp=2,cp=2", "--format", form]
    assert main([*words, "--open", "head"]) == 0
    out = capsys.readouterr().out
    assert "first rows" in out and "head" in out
    if form == "json":
        found = json.loads(out)
        assert found["tokens"] == (24 if kind == "bert" else 10)
        loss = next(node for node in found["stages"][1]["first_rank"] if node["name"] == "loss")
        assert loss["output"]["shape"] == [1, 1]


def test_images_have_as_many_tokens_as_patches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["vit"]))
    assert main(["plan", "graph", "--model", str(tmp_path), "--ranks", "2", "--seq", "8"]) == 2
    assert "an image has as many tokens as patches" in capsys.readouterr().err
