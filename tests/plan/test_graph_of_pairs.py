"""The operator graph of encoder-decoders against what runs on thread ranks count and hand over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitp.cli import main
from mpitp.comm import Group, run_threads
from mpitp.comm.mesh import abstract_mesh, make_mesh
from mpitp.config import RunConfig
from mpitp.layers.rows import Rows
from mpitp.layers.site import make_site
from mpitp.models import Batch
from mpitp.models.encoder_decoder import EncoderDecoder
from mpitp.models.encoder_decoders import (
    abstract_encoder_decoder,
    build_encoder_decoder,
    encoder_decoder_config_from_hf,
    recompute_both,
)
from mpitp.plan.graph import rank_graph
from mpitp.plan.graph_models import config_of
from mpitp.plan.kept import Sizes, kept_of_chunk
from mpitp.plan.step_graph import step_graph
from tests.plan.handed_over import by_graph, by_trace
from tests.sharded import fill
from tests.trace.test_axes import traced_run
from tests.train.kinds_case import MODELS, settings_of

LENGTH = 131  # more than one tile of scores
T5 = {
    **{"model_type": "t5", "d_model": 48, "d_kv": 8, "num_heads": 6, "d_ff": 70, "num_layers": 2, "vocab_size": 101},
    **{"num_decoder_layers": 3, "feed_forward_proj": "gated-gelu", "eos_token_id": 1},
}
SIDES = {"encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 6, "decoder_attention_heads": 4}
BART = {
    **{"model_type": "bart", "d_model": 48, "max_position_embeddings": 140, "vocab_size": 101, **SIDES},
    **{"encoder_ffn_dim": 70, "decoder_ffn_dim": 50},
}
KINDS: dict[str, dict[str, Any]] = {"t5": T5, "bart": BART, "marian": {**BART, "model_type": "marian"}}
NEEDED = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}


def _config(kind: str) -> Any:
    return encoder_decoder_config_from_hf({**NEEDED, **KINDS[kind]})


def _abstract(
    kind: str, mesh: dict[str, int], rank: int = 0, recompute: str = "none", **options: Any
) -> EncoderDecoder:
    site = make_site(abstract_mesh(mesh, rank), **options)
    return recompute_both(abstract_encoder_decoder(_config(kind), site), recompute)


def _pairs() -> Batch:
    rows, ids = Rows.of((LENGTH, LENGTH)), np.arange(2 * LENGTH) % 101
    return Batch(ids, rows, ids, source=Batch(ids[::-1].copy(), rows))


@pytest.mark.parametrize(
    ("kind", "tp", "options", "recompute"),
    [
        ("t5", 1, {}, "none"),
        ("t5", 4, {}, "every:2"),
        ("t5", 3, {"sequence_parallel": True}, "full"),
        ("bart", 3, {}, "full"),
        ("marian", 2, {"sequence_parallel": True}, "attention"),
    ],
    ids=str,
)
def test_flops_are_those_of_the_products_that_a_run_computes(
    kind: str, tp: int, options: dict[str, Any], recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, matmul, mesh = [], np.matmul, {"tp": tp}

    def counting(a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
        if np.ndim(b) == 2 and b.shape[1] > 1:  # not the sums of rows of scores
            counts.append(2 * np.size(a) * b.shape[1])
        return matmul(a, b, *args, **kwargs)

    def rank(group: Group) -> None:
        model = recompute_both(
            build_encoder_decoder(_config(kind), make_site(make_mesh(group, mesh), **options)), recompute
        )
        fill(model.named_params(), std=0.1)
        _, ctx = model.loss_forward(_pairs())
        model.loss_backward(ctx, 1.0)

    monkeypatch.setattr(np, "matmul", counting)
    run_threads(tp, rank)
    models = [_abstract(kind, mesh, each, recompute, **options) for each in range(tp)]
    assert sum(counts) == sum(rank_graph(model, Rows.of((LENGTH, LENGTH))).flops() for model in models)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}], ids=str)
def test_kept_bytes_are_those_of_the_memory_plan(kind: str, recompute: str, options: dict[str, Any]) -> None:
    model, rows = _abstract(kind, {"tp": 3}, 0, recompute, **options), Rows.of((LENGTH, LENGTH))
    kept = kept_of_chunk(model, model.chunks[0], Sizes.of(rows, model.site, 48))
    assert rank_graph(model, rows).kept_bytes() == kept


@pytest.mark.parametrize("kind", KINDS)
def test_every_node_takes_what_was_made_before_it(kind: str) -> None:
    """Ids of both sides come from outside; keys and values are made of the memory, whose gradient is that of all."""
    graph = rank_graph(_abstract(kind, {"tp": 2}, sequence_parallel=True), Rows.of((8,)))
    seen: set[str] = set()
    for node in graph.nodes.values():
        assert seen.issuperset(node.inputs), node
        assert node.inputs or node.name in ("encoder.embedding", "embedding", "loss backward"), node
        seen.add(node.name)
    joins = {node.name: node.inputs for node in graph.operations if node.kind == "residual" and "back" not in node.name}
    assert {len(inputs) for inputs in joins.values()} == {2} and len(joins) == 2 * 2 + 3 * 3
    keys = [f"blocks.{i}.cross.kv" for i in range(3)]
    assert [graph.nodes[f"{key} all_gather forward"].inputs for key in keys] == [("to decoder",)] * 3
    assert set(graph.nodes["to decoder backward"].inputs) == {f"{key} reduce_scatter backward" for key in keys}
    assert graph.nodes["blocks.1.cross.heads"].inputs == ("blocks.1.cross.q", "blocks.1.cross.kv")


LAYOUTS: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    ("t5", 3, {"tp": 3}, {}),
    ("t5", 3, {"pp": 3, "stages": [2, 1, 2]}, {"train_recompute": "full"}),
    ("bart", 4, {"tp": 2, "dp": 2}, {"optim_zero": 1}),
    ("bart", 4, {"tp": 2, "pp": 2, "sequence_parallel": True, "schedule": "interleaved"}, {}),
    ("t5", 4, {"pp": 2, "dp": 2, "stages": [3, 2]}, {"optim_zero": 2, "train_recompute": "every:2"}),
]


def _run(model: str, mesh: dict[str, Any], keys: dict[str, Any], folder: Path) -> RunConfig:
    """A step without held-out data; every text is longer than what is read of it."""
    (folder / "train.tsv").write_text("".join(f"{'abcd' * 4}\t{'abc'[i % 3]}{'dcba' * 4}\n" for i in range(12)))
    same = {"train_steps": 1, "data_valid": None, "train_eval_every": 0, "data_seq_len": 8}
    return settings_of(model, {**same, "data_train": str(folder / "train.tsv"), **keys}, mesh, folder / "run")


@pytest.mark.parametrize(("model", "ranks", "mesh", "keys"), LAYOUTS, ids=str)
def test_bytes_are_those_that_a_traced_run_hands_over(
    model: str, ranks: int, mesh: dict[str, Any], keys: dict[str, Any], tmp_path: Path
) -> None:
    """On the first rank of each stage along every axis; the memory goes from stage to stage, and its gradient back."""
    config = _run(model, mesh, keys, tmp_path)
    trace, graph = traced_run(ranks, config, tmp_path), step_graph(config, config_of(config), ranks)
    for stage in graph.stages:
        first = stage.stage * (ranks // graph.sizes["pp"])
        assert by_graph(stage) == by_trace(trace, lambda row, first=first: (first,))


@pytest.mark.parametrize("form", ["text", "json", "svg"])
@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_a_directory_is_drawn(kind: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without its data: both stacks, the cross attention, its sends over tp and what goes to the next stage."""
    (tmp_path / "config.json").write_text(json.dumps({**NEEDED, **MODELS[kind], "vocab_size": 101}))
    words = ["plan", "graph", "--model", str(tmp_path), "--ranks", "8", "--format", form]
    assert main([*words, "--mesh", "tp=2,pp=4", "--open", "1"]) == 0
    out = capsys.readouterr().out
    assert "encoder.blocks" in out and "cross.kv" in out and "to decoder" in out
    if form == "json":
        nodes = [node for stage in json.loads(out)["stages"] for node in stage["first_rank"]]
        sent = {node["name"] for node in nodes if node.get("axis") == "pp"}
        assert {name for name in sent if "memory" in name} and len(sent) > 2 * 3
        axes = {node["layer"]: node["axis"] for node in nodes if "cross" in node["layer"] and "collective" in node}
        assert {name.rpartition(".")[2] for name in axes} >= {"q", "kv", "out"} and set(axes.values()) == {"tp"}
    words += ["--mesh", "tp=2,dp=4"]
    assert main([*words, "--open", "encoder.blocks.1"]) == 0
    assert "encoder.blocks.1" in capsys.readouterr().out
    assert main([*words, "--open", "9"]) == 2
    assert "blocks 0 to 2 of the decoder, encoder.blocks.0 to 1, and" in capsys.readouterr().err
