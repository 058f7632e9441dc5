"""Wrong compositions, each written honestly (a pair says what it does), are refused when the model is put together.

Every error names the layer, the axis, what was expected and what was found. Models are abstract: nothing is computed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

import mpitp.layers.build
from examples.planted_bugs import FAULTS
from mpitp.comm import Group, abstract_mesh, run_threads
from mpitp.errors import PlacementError
from mpitp.layers import ArrayType, CopyToTP, Cut, DenseProduct, Layer, Part, ReduceFromTP, Site, make_site
from mpitp.models import CausalLM, abstract_model, config_from_hf, new_model
from tests.models.model_cases import CONFIGS

MODELS = {"gpt2": "gpt2", "llama": "llama 9/3"}
Damage = Callable[[CausalLM], None]


def model_on(name: str, mesh: Mapping[str, int], rank: int = 0) -> CausalLM:
    return abstract_model(CONFIGS[MODELS.get(name, name)], make_site(abstract_mesh(mesh, rank)))


def complaint(name: str, damage: Damage, mesh: Mapping[str, int] | None = None) -> str:
    """What is said of a damaged model that was right before."""
    model = model_on(name, mesh or {"tp": 2})
    model.types()
    damage(model)
    with pytest.raises(PlacementError) as caught:
        model.types()
    return str(caught.value)


# Pairs and layers that say what they do


class NoSum(ReduceFromTP):
    """The ranks' partial sums are handed on as they are."""

    def placements(self, incoming: ArrayType) -> ArrayType:
        return incoming


class SumTwice(ReduceFromTP):
    """A sum of sums."""

    def placements(self, incoming: ArrayType) -> ArrayType:
        return ReduceFromTP.placements(self, ReduceFromTP.placements(self, incoming))


class SumBothWays(ReduceFromTP):
    """Its backward is a sum too, which is right for what each rank uses for its own part of the work."""

    def placements(self, incoming: ArrayType) -> ArrayType:
        return ReduceFromTP.placements(self, incoming).changed(self.axis, "R")


class SumToRows(ReduceFromTP):
    """Each rank gets the sums of its own rows of tokens."""

    def placements(self, incoming: ArrayType) -> ArrayType:
        return ReduceFromTP.placements(self, incoming).changed(self.axis, "V")


class NoCopy(CopyToTP):
    """Backward leaves each rank's own part of dx."""

    def placements(self, incoming: ArrayType) -> ArrayType:
        return incoming


class PairAlone(Layer):
    """A pair as a layer of its own."""

    def __init__(self, pair: CopyToTP | ReduceFromTP) -> None:
        self.pair = pair

    def forward(self, x: Any, run: Any = None) -> Any:
        raise NotImplementedError

    def backward(self, dy: Any, ctx: Any) -> Any:
        raise NotImplementedError

    def children(self) -> Mapping[str, Layer]:
        return {}

    def placements(self, incoming: ArrayType) -> ArrayType:
        return self.pair.placements(incoming)


def at_linear(name: str, **pairs: type) -> Damage:
    """Another pair in the linear `name`."""

    def damage(model: CausalLM) -> None:
        for field, kind in pairs.items():
            setattr(model[name], field, kind(model.site.summation()))

    return damage


def before(name: str, pair: type) -> Damage:
    """A pair before the top layer `name`."""

    def damage(model: CausalLM) -> None:
        names = list(model.layers)
        place = names.index(name)
        added = {"added": PairAlone(pair(model.site.summation()))}
        kept = list(model.layers.items())
        model.layers = {**dict(kept[:place]), **added, **dict(kept[place:])}
        model.chunks = (replace(model.chunks[0], names=tuple(model.layers)),)

    return damage


def with_partial(name: str, attribute: str, axes: frozenset[str]) -> Damage:
    """The parameter's placement says that its gradient is a summand along `axes`."""

    def damage(model: CausalLM) -> None:
        param = getattr(model[name], attribute)
        param.placement = replace(param.placement, partial=axes)

    return damage


def raw_rows(name: str, part: str) -> Damage:
    """The fused weight of a linear is cut by rows, as if they were all alike."""

    def damage(model: CausalLM) -> None:
        linear, site = model[name], model.site
        parts = linear.product.placement.parts
        rows, width = sum(each.shape[0] for each in parts), parts[0].shape[1]
        dims = (Cut.of(site.share(rows)), Cut.whole(width))
        linear.product = DenseProduct(site.param(site.placement([Part(part, dims)])))

    return damage


# Forgotten sums


def test_a_forgotten_sum_before_a_bias() -> None:
    said = complaint("gpt2", at_linear("blocks.1.mlp.down", reduce=NoSum))
    assert said.startswith("blocks.1.mlp.down: what a bias is added to must be I (invariant)")
    assert said.endswith("along tp, found P (partial) (made by its own product); a sum over tp is missing before it")


def test_a_forgotten_sum_before_a_residual_connection() -> None:
    said = complaint("llama", at_linear("blocks.1.mlp.down", reduce=NoSum))
    assert said.startswith("blocks.1: ") and "made by blocks.1.mlp" in said
    assert "must be I (invariant)" in said and "along tp, found P (partial)" in said


@pytest.mark.parametrize(("name", "place"), [("gpt2", "positions"), ("llama", "blocks.0.norm1")])
def test_a_forgotten_sum_of_the_embedding(name: str, place: str) -> None:
    said = complaint(name, at_linear("embedding", reduce=NoSum))
    assert said.startswith(f"{place}: what is normalised must be I") or name == "gpt2"
    assert said.startswith(f"{place}: ") and "along tp, found P (partial) (made by embedding)" in said


@pytest.mark.parametrize("name", MODELS)
def test_a_forgotten_sum_of_the_loss(name: str) -> None:
    said = complaint(name, at_linear("loss", reduce=NoSum))
    assert said.startswith("loss: denominators and target logits must be I") and "along tp, found P (partial)" in said


# Sums along another axis, and sums too many


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("place", ["embedding", "blocks.0.attention.out", "blocks.1.mlp.down"])
def test_a_sum_along_another_axis(name: str, place: str) -> None:
    def damage(model: CausalLM) -> None:
        model[place].reduce = ReduceFromTP(model.site.summation("dp"), axis="dp")

    said = complaint(name, damage, {"dp": 2, "tp": 2})
    assert said.startswith(f"{place}: what is summed over the ranks must be P (partial) along dp, found V (varying)")


@pytest.mark.parametrize("name", MODELS)
def test_a_loss_along_another_axis(name: str) -> None:
    def damage(model: CausalLM) -> None:
        model.loss.reduce = ReduceFromTP(model.site.summation("dp"), axis="dp")

    said = complaint(name, damage, {"dp": 2, "tp": 2})
    assert said.startswith("loss: logits must be cut as vocab 0:27 of 53 along dp, found vocab 0:27 of 53 along tp")


def test_parts_that_become_one_array() -> None:
    half, other = Cut(8, range(4), range(4), (), "tp"), Cut(8, range(3), range(3), (), "tp")
    varying = ArrayType.of(("tp",), tp="V")
    both = varying.changed("tp", "V", (("gate", half), ("up", half)))
    one = varying.changed("tp", "V", (("gate", half),))
    assert both.joined(2, "gate and up") == one
    assert varying.joined(2, "gate and up") == varying
    with pytest.raises(PlacementError, match=r"gate and up must be I .* found P"):
        both.changed("tp", "P", both.columns).joined(2, "gate and up")
    for wrong in (one, one.changed("tp", "V", (("gate", half), ("up", other)))):
        with pytest.raises(PlacementError, match=r"gate and up must be cut as gate 0:4 of 8 .*, found gate"):
            wrong.joined(2, "gate and up")


@pytest.mark.parametrize("name", MODELS)
def test_a_copy_along_another_axis(name: str) -> None:
    def damage(model: CausalLM) -> None:
        model["blocks.0.attention.qkv"].copy = CopyToTP(model.site.summation("dp"), axis="dp")

    said = complaint(name, damage, {"dp": 2, "tp": 2})
    assert said.startswith(
        "blocks.0.attention.qkv: what is copied to all ranks must be I (invariant) along dp, found V"
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("place", ["embedding", "blocks.0.attention.out", "blocks.1.mlp.down", "loss"])
def test_a_sum_of_sums(name: str, place: str) -> None:
    said = complaint(name, at_linear(place, reduce=SumTwice))
    assert said.startswith(f"{place}: what is summed over the ranks must be P (partial) along tp, found I (invariant)")


@pytest.mark.parametrize("name", MODELS)
def test_a_sum_of_what_is_whole(name: str) -> None:
    said = complaint(name, before("final_norm", ReduceFromTP))
    assert said.startswith("added: what is summed over the ranks must be P (partial) along tp, found I (invariant)")
    assert "made by blocks.1" in said


@pytest.mark.parametrize(("name", "found"), [("gpt2", "the gradient of bias is"), ("llama", "found R (replicate)")])
def test_a_sum_in_both_directions(name: str, found: str) -> None:
    said = complaint(name, at_linear("blocks.1.mlp.down", reduce=SumBothWays))
    assert said.startswith("blocks.1") and found in said and "along tp" in said


# Gradients that nobody sums, or that are summed once too often


@pytest.mark.parametrize("name", MODELS)
def test_a_weight_that_each_rank_uses_for_its_own_part(name: str) -> None:
    said = complaint(name, before("final_norm", CopyToTP))
    expected = "final_norm: the gradient of weight is a summand along tp, since what meets it is R there (made by "
    assert said.startswith(expected) and "declare the parameter partial along tp" in said


@pytest.mark.parametrize(("name", "place"), [("gpt2", "positions"), ("llama", "blocks.0.norm1")])
def test_a_weight_on_each_ranks_own_tokens(name: str, place: str) -> None:
    said = complaint(name, at_linear("embedding", reduce=SumToRows))
    assert said.startswith(f"{place}: the gradient of weight is a summand along tp, since what meets it is V there")


def test_a_norm_on_each_ranks_own_tokens_is_right_when_its_gradient_is_summed() -> None:
    model = model_on("llama", {"tp": 2})
    norm, tokens = model["blocks.0.norm1"], ArrayType.of(("tp",), tp="V")
    with pytest.raises(PlacementError, match="gradient of weight is a summand along tp"):
        norm.placements(tokens)
    with_partial("blocks.0.norm1", "weight", frozenset({"tp"}))(model)
    assert norm.placements(tokens) == tokens


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("place", ["blocks.0.norm2", "final_norm", "embedding"])
def test_a_gradient_that_no_rank_of_dp_sums(name: str, place: str) -> None:
    said = complaint(name, with_partial(place, "weight", frozenset()), {"dp": 2, "tp": 2})
    assert said.startswith(f"{place}: the gradient of weight is a summand along dp, since what meets it is V there")


@pytest.mark.parametrize("name", MODELS)
def test_a_gradient_that_is_summed_though_it_is_whole(name: str) -> None:
    said = complaint(name, with_partial("final_norm", "weight", frozenset({"tp"})))
    assert said.startswith("final_norm: the gradient of weight is whole along tp, since what meets it is I there")
    assert "take tp out" in said


# Copies that are missing, and cuts that don't fit


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("place", ["blocks.0.attention.qkv", "blocks.1.mlp", "head"])
def test_a_copy_that_is_missing(name: str, place: str) -> None:
    if place == "blocks.1.mlp":
        place += {"gpt2": ".up", "llama": ".gate_up"}[name]
    said = complaint(name, at_linear(place, copy=NoCopy))
    assert said.startswith(
        f"{place}: x of a column-parallel product must be R (replicate) along tp, found I (invariant)"
    )
    assert said.endswith("a copy along tp, which sums dx, is missing")


@pytest.mark.parametrize(("name", "heads"), [("gpt2", "0:6 of 12"), ("llama", "0:10 of 18")])
def test_rows_that_are_cut_in_another_way_than_the_columns_that_come(name: str, heads: str) -> None:
    def damage(model: CausalLM) -> None:
        model["blocks.0.attention"].out = model["blocks.0.mlp.down"]

    said = complaint(name, damage)
    assert said.startswith("blocks.0.attention.out: x of a row-parallel linear must be cut as down 0:19 of 37 along tp")
    assert f"found o {heads} along tp (made by blocks.0.attention.heads)" in said


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_another_cut(name: str) -> None:
    def damage(model: CausalLM) -> None:
        model.loss.vocab = make_site(abstract_mesh({"tp": 2}, rank=1)).share(53)

    said = complaint(name, damage)
    assert said.startswith("loss: logits must be cut as vocab 27:53 of 53 along tp, found vocab 0:27 of 53 along tp")


# The catalogue of planted faults: those that a type error names, written as honest compositions


# Each with how the message begins: the layer, and what is wrong there.
HONEST: dict[str, tuple[Damage, str]] = {
    "missing all-reduce forward": (
        at_linear("blocks.1.mlp.down", reduce=NoSum),
        r"blocks\.1(\.mlp\.down)?: what .* must be I .* along tp, found P .* a sum over tp is missing",
    ),
    "missing all-reduce of dx": (
        at_linear("blocks.1.attention.qkv", copy=NoCopy),
        r"blocks\.1\.attention\.qkv: .* must be R \(replicate\) along tp, found I .* a copy along tp, .* is missing",
    ),
    "missing all-reduce of dx at the head": (
        at_linear("head", copy=NoCopy),
        r"head: .* must be R \(replicate\) along tp, found I .* a copy along tp, .* is missing",
    ),
    "all-reduce in both directions": (
        at_linear("blocks.1.mlp.down", reduce=SumBothWays),
        r"blocks\.1(\.mlp\.down: .* a summand along tp, since what meets it is R|: .* be I .* along tp, found R)",
    ),
    "bias added on every rank": (
        at_linear("blocks.1.attention.out", reduce=NoSum),
        r"blocks\.1\.attention\.out: what a bias is added to must be I .* along tp, found P",
    ),
    "fused qkv cut straight through": (
        raw_rows("blocks.1.attention.qkv", "qkv"),
        r"blocks\.1\.attention\.heads: .* cut as q 0:6 of 12 along tp, found qkv 0:18 of 36 .*made by .*attention\.qkv",
    ),
    "fused gate and up cut straight through": (
        raw_rows("blocks.1.mlp.gate_up", "gate_up"),
        r"blocks\.1\.mlp\.activation: gate and up must be cut as .*, found gate_up 0:37 of 74 .*made by .*mlp\.gate_up",
    ),
    "target logits counted twice": (
        at_linear("loss", reduce=SumTwice),
        r"loss: what is summed over the ranks must be P \(partial\) along tp, found I",
    ),
    "softmax over the local vocabulary": (
        at_linear("loss", reduce=NoSum),
        r"loss: denominators and target logits must be I .* along tp, found P",
    ),
    "bias gradient summed over ranks": (
        with_partial("blocks.1.mlp.down", "bias", frozenset({"tp"})),
        r"blocks\.1\.mlp\.down: the gradient of bias is whole along tp, .* it would be summed once more",
    ),
}


def test_the_catalogue_says_which_faults_types_name() -> None:
    assert set(HONEST) == {name for name, fault in FAULTS.items() if fault.types}
    assert len(FAULTS) - len(HONEST) == 12


@pytest.mark.parametrize(("fault", "name"), [(fault, name) for fault in HONEST for name in FAULTS[fault].models])
def test_a_fault_of_the_catalogue_is_named_when_the_model_is_built(fault: str, name: str) -> None:
    damage, begins = HONEST[fault]
    assert re.match(begins, complaint(name, damage))


# Right models


MESHES: tuple[dict[str, int], ...] = (
    *({"tp": size} for size in (1, 2, 3, 5, 64, 4096)),
    {"dp": 2, "tp": 2},
    {"dp": 64, "tp": 64},
    {"dp": 4096, "tp": 1},
    {"pp": 2, "dp": 4, "ep": 2, "cp": 2, "tp": 8},
)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_right_models_pass_at_any_size(name: str, mesh: dict[str, int]) -> None:
    started = time.process_time()
    ends = [model_on(name, mesh, rank).types() for rank in (0, abstract_mesh(mesh).world.size - 1)]
    for types in ends if mesh.get("pp", 1) == 1 else [ends[0] | ends[1]]:  # the first and the last stage
        assert types["head"].outgoing.along("tp") == "V" and types["loss"].outgoing.along("tp") == "I"
        assert types["embedding"].incoming.along("dp") == ("V" if mesh.get("dp", 1) > 1 else "I")
    assert time.process_time() - started < 0.5


def test_a_model_of_405_billion_weights_on_4096_ranks_is_checked_in_no_time() -> None:
    raw = {"model_type": "llama", "vocab_size": 128256, "hidden_size": 16384, "num_attention_heads": 128}
    raw |= {"num_key_value_heads": 8, "num_hidden_layers": 126, "intermediate_size": 53248}
    config = config_from_hf({**raw, "max_position_embeddings": 131072})
    started = time.process_time()
    types = abstract_model(config, make_site(abstract_mesh({"dp": 8, "tp": 512}, rank=4095))).types()
    assert time.process_time() - started < 1
    assert len(types) > 126 * 8


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_wrong_model_is_refused_on_every_rank_before_it_has_memory(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mpitp.layers.build, "ReduceFromTP", NoSum)
    monkeypatch.setattr(Site, "param", lambda site, *args, **options: _only_abstract(site, *args, **options))

    def refused(group: Group) -> str:
        with pytest.raises(PlacementError) as caught:
            new_model(CONFIGS["gpt2"], make_site(group), seed=1)
        return str(caught.value)

    said = run_threads(ranks, refused)
    assert len(said) == ranks
    assert all(each.startswith("positions: ") and "found P (partial) (made by embedding)" in each for each in said)


_PARAM = Site.param


def _only_abstract(site: Site, *args: Any, **options: Any) -> Any:
    assert site.device.name == "abstract", "memory was taken before the types were looked at"
    return _PARAM(site, *args, **options)
