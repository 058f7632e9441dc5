"""The operator graph against what runs on thread ranks count, and against the closed forms that there are."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitp.bench.traffic import step_traffic
from mpitp.comm import Group, run_threads
from mpitp.comm.mesh import abstract_mesh, make_mesh
from mpitp.layers.rows import Rows
from mpitp.layers.site import make_site
from mpitp.models import Batch, CausalLM, build_model, config_from_hf
from mpitp.models.registry import abstract_model, recompute_blocks
from mpitp.plan.graph import rank_graph
from mpitp.plan.kept import Sizes, kept_of_chunk
from mpitp.plan.nodes import Collective, Operation, RankGraph
from mpitp.plan.step_graph import step_graph
from mpitp.train.setup import run_source
from tests.models.model_cases import CONFIGS
from tests.plan.cases import MOE
from tests.sharded import fill
from tests.trace.test_axes import LAYOUTS, traced
from tests.train.layouts import layout_config
from tests.train.run_case import make_data

LLAMA = {
    "model_type": "llama", "hidden_size": 48, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8,
    "vocab_size": 101, "num_hidden_layers": 2, "intermediate_size": 70, "max_position_embeddings": 256,
}  # fmt: skip
GEMMA2 = {**LLAMA, "model_type": "gemma2", "sliding_window": 40, "query_pre_attn_scalar": 8}
NEOX = {
    "model_type": "gpt_neox", "hidden_size": 48, "num_attention_heads": 6, "vocab_size": 101, "num_hidden_layers": 2,
    "intermediate_size": 70, "max_position_embeddings": 256,
}  # fmt: skip
MODELS = {"llama": LLAMA, "gemma2": GEMMA2, "neox": NEOX}
LENGTHS = (131, 131)  # more than one tile of scores, and of rows of a product

COUNTED: list[tuple[str, dict[str, int], dict[str, Any], str]] = [  # model, mesh, the site, recompute
    ("llama", {"tp": 1}, {}, "none"),
    ("llama", {"tp": 2}, {}, "attention"),
    ("llama", {"tp": 4}, {"sequence_parallel": True}, "full"),
    ("gemma2", {"tp": 3}, {}, "every:2"),
    ("neox", {"tp": 2}, {}, "none"),
    ("llama", {"cp": 2, "tp": 1}, {}, "none"),
    ("llama", {"cp": 3, "tp": 1}, {"cp_form": "heads"}, "none"),
    ("gemma2", {"cp": 2, "tp": 1}, {}, "none"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graph")
    make_data(folder)
    return folder


@pytest.mark.parametrize(("name", "mesh", "options", "recompute"), COUNTED, ids=str)
def test_flops_are_those_of_the_products_that_a_run_computes(
    name: str, mesh: dict[str, int], options: dict[str, Any], recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every matrix product of forward and backward on thread ranks is counted as NumPy is asked for it."""
    config, counts = config_from_hf(MODELS[name]), []
    matmul = np.matmul

    def counting(a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
        if np.ndim(b) == 2 and b.shape[1] > 1:  # not the sums of rows of scores
            counts.append(2 * np.size(a) * b.shape[1])
        return matmul(a, b, *args, **kwargs)

    def rank(group: Group) -> None:
        model = build_model(config, make_site(make_mesh(group, mesh), **options))
        fill(model.named_params(), std=0.1)
        recompute_blocks(model, recompute)
        tokens = np.arange(sum(LENGTHS)).reshape(2, -1) % 101
        batch = Batch.of_rows(tokens, tokens)
        cp = model.site.mesh["cp"]
        _, ctx = model.loss_forward(batch.cut(cp.rank, cp.size) if cp.size > 1 else batch)
        model.loss_backward(ctx, 1.0)

    ranks = int(np.prod(list(mesh.values())))
    monkeypatch.setattr(np, "matmul", counting)
    run_threads(ranks, rank)
    rows = Rows.of(LENGTHS)
    expected = 0
    for each in range(ranks):
        model = abstract_model(config, make_site(abstract_mesh(mesh, each), **options))
        expected += rank_graph(recompute_blocks(model, recompute), rows).flops()
    assert sum(counts) == expected


MIXTURES: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (2, {"ep": 2, "tp": 1}, {"model": "qwen2_moe"}),
    (4, {"ep": 2, "tp": 2}, {"model": "mixtral"}),
]
PLAIN = [case for case in LAYOUTS if not {"model", "train_invariant"} & set(case[2]) and case[2].get("optim_zero") != 3]


@pytest.mark.parametrize(("ranks", "mesh", "keys"), PLAIN + MIXTURES, ids=str)
def test_bytes_are_those_that_a_traced_run_hands_over(
    ranks: int,
    mesh: dict[str, Any],
    keys: dict[str, Any],
    data: Path,
    tmp_path: Path,
) -> None:
    """On the first rank of each stage, along every axis, twice; the mean along cp and ep, where rows are exchanged for
    heads, and go to experts.
    """
    trace = traced(ranks, data, tmp_path, mesh, keys)
    model, layout = keys.get("model", "gpt2"), {key: value for key, value in keys.items() if key != "model"}
    config = layout_config(data, tmp_path / "again", mesh, layout, model, train_steps=2, train_global_batch_size=4)
    graph = step_graph(config, config_from_hf({**config.model.fields, "vocab_size": 256 + 1}), ranks)
    in_stage, mean, tp = ranks // graph.sizes["pp"], graph.sizes["cp"] * graph.sizes["ep"], graph.sizes["tp"]
    for stage in graph.stages:
        counted: Counter[str] = Counter()
        for row in trace.ledger:
            if row.formula and row.kind != "recv":
                begin = stage.stage * in_stage
                counted[row.axis] += sum(row.bytes_by_rank[begin : begin + mean * tp : tp]) // mean
        own: Counter[str] = Counter()
        for node in stage.first.collectives:
            if node.op != "recv":
                own[node.axis] += 2 * int(node.given_bytes * node.passes * stage.microbatches)
        for node in stage.update:
            if isinstance(node, Collective) and node.op != "broadcast" and node.layer != "gradient norm":
                own[node.axis] += 2 * int(node.given_bytes)
        assert own == counted


@pytest.mark.parametrize("name", ["gpt2", "llama 9/3", "llama biases, tied, 5/1, llama3"])
@pytest.mark.parametrize(("ranks", "blocks"), [(2, 0), (4, 0), (3, 5)])
def test_collectives_are_those_of_the_benchmark(name: str, ranks: int, blocks: int) -> None:
    config, rows = CONFIGS[name], Rows.of((7, 7))
    model = abstract_model(config, make_site(abstract_mesh({"tp": ranks}), dtype="float32", invariant_blocks=blocks))
    graph = rank_graph(model, rows)
    expected = [row for row in step_traffic(config, ranks, 14, 4, blocks) if row.what.endswith("ward")]
    whole = [rank_graph(abstract_model(config, make_site(abstract_mesh({"tp": ranks}, each), dtype="float32",
             invariant_blocks=blocks)), rows) for each in range(ranks)]  # fmt: skip
    calls = sum(node.calls for node in graph.collectives)
    assert calls == sum(row.calls for row in expected)
    if not blocks:
        given = sum((node.given_bytes for node in graph.collectives), start=Fraction(0))
        assert given == sum(row.total_bytes for row in expected)
    assert len({sum(node.calls for node in each.collectives) for each in whole}) == 1


@pytest.mark.parametrize("recompute", ["none", "attention", "full"])
@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}], ids=str)
def test_kept_bytes_are_those_of_the_memory_plan(recompute: str, options: dict[str, Any]) -> None:
    """Apart from the rotary tables, which the pass keeps and no layer."""
    config, rows = config_from_hf(LLAMA), Rows.of(LENGTHS)
    model = abstract_model(config, make_site(abstract_mesh({"tp": 3}), **options))
    recompute_blocks(model, recompute)
    sizes = Sizes.of(rows, model.site, config.hidden_size)
    tables = 2 * sizes.rows * (config.head_dim // 2) * sizes.wide
    assert rank_graph(model, rows).kept_bytes() + tables == kept_of_chunk(model, model.chunks[0], sizes)


def test_every_node_takes_what_was_made_before_it() -> None:
    """Forward from the embedding, backward from the loss, and the residual's two branches meet."""
    for name, raw in MODELS.items():
        graph = rank_graph(abstract_model(config_from_hf(raw), make_site(abstract_mesh({"tp": 4}))), Rows.of((8,)))
        seen: set[str] = set()
        for node in graph.nodes.values():
            assert seen.issuperset(node.inputs), (name, node)
            assert node.inputs or node.name in ("embedding", "loss backward")
            seen.add(node.name)
        joins = [node for node in graph.operations if node.kind == "residual" and node.phase == "forward"]
        assert {len(node.inputs) for node in joins} == {3 if name == "neox" else 2}


def test_arrays_bear_their_types() -> None:
    """A partial sum before the all-reduce, equal values behind it; rows are gathered under sequence parallelism."""
    config = config_from_hf(LLAMA)
    plain = rank_graph(abstract_model(config, make_site(abstract_mesh({"tp": 4}))), Rows.of((8,)))
    assert str(plain.nodes["blocks.0.mlp.down"].output) == "[8, 48] tp:P"
    assert str(plain.nodes["blocks.0.mlp.down all_reduce sum forward"].output) == "[8, 48] tp:I"
    assert str(plain.nodes["blocks.0.mlp.gate_up backward"].output) == "[8, 48] tp:P"
    site = make_site(abstract_mesh({"tp": 4}), sequence_parallel=True)
    cut = rank_graph(abstract_model(config, site), Rows.of((8,)))
    assert str(cut.nodes["blocks.0.norm1"].output) == "[2, 48] tp:V"
    assert str(cut.nodes["blocks.0.attention.qkv all_gather forward"].output) == "[8, 48] tp:R"
    assert str(cut.nodes["blocks.0.attention.out"].output) == "[8, 48] tp:P"
    assert str(cut.nodes["blocks.0.attention.out reduce_scatter forward"].output) == "[2, 48] tp:V"


def test_stages_are_those_that_ranks_make(data: Path, tmp_path: Path) -> None:
    """A stage's graph is that of the model that its own rank builds, layer by layer, interleaved chunks too."""
    mesh = {"pp": 2, "tp": 3, "schedule": "interleaved"}
    config = layout_config(data, tmp_path / "run", mesh, {"train_recompute": "every:2"}, train_global_batch_size=8)
    config_model = {**config.model.fields, "vocab_size": 257, "n_layer": 4}
    decoder = config_from_hf(config_model)
    graph = step_graph(config, decoder, 6)
    for stage in graph.stages:
        for tp_rank, found in ((0, stage.first), (2, stage.last)):
            model = _of_rank(config, decoder, 3 * stage.stage + tp_rank)
            rows = Rows.of((config.data.seq_len,) * config.train.micro_batch_size)
            assert found.nodes == rank_graph(model, rows).nodes
    assert sum(stage.params for stage in graph.stages) > 0
    names = [name for stage in graph.stages for own in stage.chunks for name in own]
    assert len(names) == len(set(names)) and "head" in names


def _of_rank(config: Any, decoder: Any, rank: int) -> CausalLM:
    from mpitp.backend.device import AbstractDevice
    from mpitp.train.setup import mesh_sizes, site_on

    site = site_on(config, decoder, abstract_mesh(mesh_sizes(config), rank, 6), AbstractDevice())
    model = abstract_model(decoder, site, run_source(config, decoder).cutting)
    return recompute_blocks(model, config.train.recompute)


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"ep": 2}, {"ep": 2, "tp": 2}], ids=str)
def test_a_mixture_of_experts(mesh: dict[str, int]) -> None:
    """Products of the rows as dealt evenly, the router before its experts, and the ledger's bytes of an exchange."""
    site = make_site(abstract_mesh(mesh))
    model = abstract_model(config_from_hf(MOE), site)
    graph, t, h, tp = rank_graph(model, Rows.of((8,))), 8, 48, mesh.get("tp", 1)
    experts = graph.nodes["blocks.0.mlp.experts"]
    assert isinstance(experts, Operation) and experts.flops == 2 * (2 * t) * (3 * 40 // tp) * h
    assert "blocks.0.mlp.router" in graph.nodes and _comes_from(graph, "blocks.0.mlp.experts", "blocks.0.mlp.router")
    for branch in ("experts", "shared.gate", "shared.mlp.down"):
        assert _comes_from(graph, "blocks.0.residual2", f"blocks.0.mlp.{branch}")
    moved = [node for node in graph.nodes.values() if isinstance(node, Collective) and node.op == "all_to_all"]
    sent = sum(node.given_bytes for node in moved if node.layer == "blocks.0.mlp.experts")
    assert sent == (4 * 2 * t * h * 4 + 8 * 5 if "ep" in mesh else 0)


def _comes_from(graph: RankGraph, name: str, source: str) -> bool:
    found, left = set(), [name]
    while left:
        node = left.pop()
        found.add(node)
        left += [each for each in graph.nodes[node].inputs if each not in found]
    return source in found


def test_operations_add_up() -> None:
    """3 x 2 t n k for every linear, whatever the ranks: shards together make the whole."""
    config, rows = config_from_hf(LLAMA), Rows.of((8,))

    def products(ranks: int) -> int:
        graphs = [
            rank_graph(abstract_model(config, make_site(abstract_mesh({"tp": ranks}, each))), rows)
            for each in range(ranks)
        ]
        nodes = [node for graph in graphs for node in graph.operations]
        return sum(node.flops for node in nodes if isinstance(node, Operation) and node.layer == "blocks.0.mlp.down")

    assert {products(ranks) for ranks in (1, 2, 3, 5)} == {3 * 2 * 8 * 48 * 70}
