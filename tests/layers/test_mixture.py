"""Mixtures of experts: equal experts are the dense model, hot experts, capacities, and what is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from mpitp.backend.device import CpuDevice, Device
from mpitp.comm import Group, SerialGroup, make_mesh, run_threads
from mpitp.errors import ConfigError
from mpitp.layers.exchange import ExchangeOverEp
from mpitp.layers.partition import split_evenly
from mpitp.layers.site import make_site
from mpitp.models import CausalLM, build_model, config_from_hf
from mpitp.optim.adamw import AdamWSettings
from mpitp.verify.run import deal, plain_step
from tests.layers.test_contract import arrays_in
from tests.models.model_cases import LLAMA, MIXTURE_RAW, make_batch
from tests.sharded import StrictDevice, assert_close, fill, gradients

MIXTRAL = {**MIXTURE_RAW["mixtral"], "output_router_logits": False, "router_z_loss_coef": 0.0}


def with_equal_experts(model: CausalLM, dense: CausalLM) -> None:
    """Every expert has the MLP of the dense model, all else is the dense model's too."""
    theirs = dict(dense.named_params())
    for name, param in model.named_params():
        if ".experts." in name:
            of_mlp = theirs[name.replace("experts.", "") + ".weight"].data
            param.data[...] = of_mlp[None]
        elif ".router." in name:
            fill([(name, param)])
        else:
            param.data[...] = theirs[name].data


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("top_k", [1, 5])
def test_equal_experts_are_the_dense_model(ranks: int, top_k: int) -> None:
    """Scores add up to 1, so that the choice doesn't matter."""

    def run(group: Group) -> tuple[np.ndarray, np.ndarray]:
        site = make_site(group, dtype="float64")
        sizes = {"intermediate_size": MIXTRAL["intermediate_size"], "rms_norm_eps": 1e-5}
        dense = build_model(config_from_hf({**LLAMA, **sizes}), site)
        fill(dense.named_params())
        model = build_model(config_from_hf({**MIXTRAL, "num_experts_per_tok": top_k}), site)
        with_equal_experts(model, dense)
        batch = make_batch(dense.config)
        return tuple(each.gather_logits(each.forward(batch)[0]) for each in (model, dense))  # type: ignore[return-value]

    for found, expected in run_threads(ranks, run):
        np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-12)


def gradients_of(group: Group, raw: Mapping[str, Any], mesh: Mapping[str, int], hot: int | None) -> Any:
    """Loss and gradients of a step of three microbatches. `hot`: the expert that every token prefers."""
    site = make_site(make_mesh(group, mesh), dtype="float64")
    model = build_model(config_from_hf(raw), site)
    fill(model.named_params(), std=0.2)
    for name, param in model.named_params():
        if name.endswith("norm2.weight") and hot is not None:
            param.data[...] = 0.0  # a router of noughts takes the first experts
    step = plain_step(model, AdamWSettings(), 0.0)
    batches = [make_batch(model.config, 1, first=i, samples=[i]) for i in range(3)]
    loss, _ = step.accumulate(deal(site, batches))
    named = list(model.named_params())
    for _, param in named:
        param.grad = param.grad_or_zeros()
    return loss, gradients(group, named)


@pytest.mark.parametrize("model", ["mixtral", "qwen2_moe"])
@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_legs_change_no_bit(model: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that travel in several legs, some of them empty, meet the same experts in the same products."""
    found = []
    for num_legs in (1, 2, 3):

        def over(group: Group, num_experts: int, weights: Sequence[float], legs: int = num_legs) -> ExchangeOverEp:
            return ExchangeOverEp(group, split_evenly(num_experts, group.size), legs)

        monkeypatch.setattr(ExchangeOverEp, "over", over)
        found.append(run_threads(ranks, gradients_of, MIXTURE_RAW[model], {"ep": ranks, "tp": 1}, None)[0])
    for loss, grads in found[1:]:
        assert loss == found[0][0]
        assert_close(grads, found[0][1], 0.0)


def test_legs_are_as_many_as_hide_something() -> None:
    """Two where messages move on while the rank computes and the rank with most experts has several; else one."""

    def num_legs(group: Group, num_experts: int, *, in_background: bool) -> int:
        group.in_background = in_background
        return ExchangeOverEp.over(group, num_experts).num_legs

    for experts, in_background, expected in ((5, True, 2), (2, True, 1), (5, False, 1)):
        assert run_threads(2, lambda *args: num_legs(*args[:2], in_background=args[2]), experts, in_background) == [
            expected,
            expected,
        ]


LAYOUTS = [{"ep": 2, "tp": 1}, {"ep": 3, "tp": 2}, {"ep": 7, "tp": 1}, {"dp": 2, "ep": 2, "tp": 1}]


@pytest.mark.parametrize("changes", [{}, {"expert_capacity_factor": 0.6, "num_experts_per_tok": 3}], ids=str)
@pytest.mark.parametrize("mesh", LAYOUTS, ids=str)
def test_a_hot_expert_and_full_ones(mesh: dict[str, int], changes: dict[str, Any]) -> None:
    """All rows go to the first experts, whose ranks have all the work; others have none, or no experts at all."""
    raw = {**MIXTURE_RAW["mixtral"], "num_experts_per_tok": 1, **changes}
    ((loss, expected),) = run_threads(1, gradients_of, raw, {}, 0)
    for found_loss, found in run_threads(int(np.prod(list(mesh.values()))), gradients_of, raw, mesh, 0):
        assert found_loss == pytest.approx(loss, rel=1e-12)
        assert_close(found, expected, 1e-11)


@pytest.mark.parametrize("mesh", [{"ep": 2, "tp": 2}, {"ep": 5, "tp": 1}], ids=str)
def test_a_capacity_drops_the_same_rows_in_every_layout(mesh: dict[str, int]) -> None:
    raw = {**MIXTURE_RAW["qwen2_moe"], "expert_capacity_factor": 0.8}
    ((loss, expected),) = run_threads(1, gradients_of, raw, {}, None)
    ((without, _),) = run_threads(1, gradients_of, {**raw, "expert_capacity_factor": 0.0}, {}, None)
    assert loss != pytest.approx(without, rel=1e-9), "nothing was dropped"
    for found_loss, found in run_threads(int(np.prod(list(mesh.values()))), gradients_of, raw, mesh, None):
        assert found_loss == pytest.approx(loss, rel=1e-12)
        assert_close(found, expected, 1e-11)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts_per_tok": 6}, "num_experts_per_tok=6 exceeds num_local_experts=5: a token can't go to more"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok must be at least 1"),
        ({"num_local_experts": 0}, "num_local_experts must be at least 1"),
        ({"router_aux_loss_coef": -1.0}, "router_aux_loss_coef must be at least 0"),
        ({"router_z_loss_coef": -1.0}, "router_z_loss_coef must be at least 0"),
        ({"expert_capacity_factor": -0.5}, "expert_capacity_factor must be at least 0"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 is not supported"),
    ],
)
def test_what_a_config_may_not_say(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config_from_hf({**MIXTURE_RAW["mixtral"], **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be at least 1"),
        ({"mlp_only_layers": [0.5]}, "mlp_only_layers must be a list of whole numbers"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size must be at least 1"),
    ],
)
def test_what_a_qwen_may_not_say(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config_from_hf({**MIXTURE_RAW["qwen2_moe"], **changes})


def test_the_invariant_mode_refuses_experts() -> None:
    with pytest.raises(ConfigError, match="invariant mode has no mixture of experts"):
        build_model(config_from_hf(MIXTRAL), make_site(SerialGroup(), invariant_blocks=2))


def test_a_capacity_needs_whole_microbatches() -> None:
    """Along cp a rank knows only its own rows' choices."""
    config = config_from_hf({**MIXTRAL, "expert_capacity_factor": 1.0})

    def build(group: Group) -> None:
        with pytest.raises(ConfigError, match="expert_capacity_factor"):
            build_model(config, make_site(make_mesh(group, {"cp": 2, "tp": 1})))

    run_threads(2, build)


def loss_and_gradients(group: Group, device: Device, raw: Mapping[str, Any], mesh: Mapping[str, int]) -> Any:
    model = build_model(config_from_hf(raw), make_site(make_mesh(group, mesh), dtype="float64", device=device))
    fill(model.named_params())
    loss, ctx = model.loss_forward(make_batch(model.config, 2))
    model.loss_backward(ctx, 0.1)
    return loss, gradients(group, list(model.named_params()))


def test_a_context_is_not_written_to_and_can_be_pickled() -> None:
    model = build_model(config_from_hf(MIXTURE_RAW["qwen2_moe"]), make_site(SerialGroup(), dtype="float64"))
    fill(model.named_params())
    _, ctx = model.loss_forward(make_batch(model.config, 2))
    before = copy.deepcopy(ctx.model)
    model.loss_backward(ctx, 0.1)
    pairs = zip(arrays_in(before), arrays_in(ctx.model), strict=True)
    assert all(np.array_equal(one, other) for one, other in pairs)
    grads = gradients(SerialGroup(), model.named_params())
    model.zero_grad()
    model.loss_backward(pickle.loads(pickle.dumps(ctx)), 0.1)
    assert_close(gradients(SerialGroup(), model.named_params()), grads, 0.0)


@pytest.mark.parametrize("mesh", [{}, {"ep": 2, "tp": 1}], ids=str)
def test_arrays_stay_on_their_device(mesh: dict[str, int]) -> None:
    raw = {**MIXTURE_RAW["qwen2_moe"], "expert_capacity_factor": 0.8}
    ranks = mesh.get("ep", 1)
    (loss, expected), *_ = run_threads(ranks, loss_and_gradients, CpuDevice(), raw, mesh)
    (found_loss, found), *_ = run_threads(ranks, loss_and_gradients, StrictDevice(), raw, mesh)
    assert found_loss == pytest.approx(loss, rel=1e-12)
    assert_close(found, expected, 1e-12)
