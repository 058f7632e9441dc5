"""Both models on the stand-in for CuPy: passes, training and generation give what they give on NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from mpitp.backend.device import CpuDevice, Device
from mpitp.comm import Group, SerialGroup, make_mesh, run_threads
from mpitp.infer.generate import generate
from mpitp.infer.sampling import Sampling
from mpitp.layers.passes import DropoutState
from mpitp.layers.site import make_site
from mpitp.models import build_model, new_model
from mpitp.optim.grad_sync import sync_gradients
from tests import strict_cupy
from tests.models.model_cases import CONFIGS, Arrays, forward_backward, make_batch, make_model, train
from tests.sharded import StrictDevice, assert_close, assert_same_bits, fill, gradients, weights

MODELS = ["gpt2", "llama 9/3", "llama biases, tied, 5/1, llama3", "qwen2 6/2, tied"]


def full_run(group: Group, name: str, device: Device, num_blocks: int = 0) -> Arrays:
    model = make_model(group, CONFIGS[name], device=device, invariant_blocks=num_blocks)
    result = forward_backward(model, [make_batch(model.config, 2, DropoutState(0, 0))])
    model.zero_grad()
    result |= train(model, steps=2, dropout=True)
    for key, sampling in (("greedy", Sampling()), ("sampled", Sampling(1.0, top_k=9, top_p=0.9, seed=1))):
        for i, text in enumerate(generate(model, [[1, 2, 3], [4]], 5, sampling, eos_ids=())):
            result[f"{key} {i}"] = np.array(text.tokens)
    for _, param in model.named_params():
        assert isinstance(param.data, strict_cupy.ndarray) == (device.name == "strict")
    return result


@pytest.mark.parametrize(("ranks", "num_blocks"), [(1, 0), (3, 0), (2, 4)])
@pytest.mark.parametrize("name", MODELS)
def test_same_as_numpy(name: str, ranks: int, num_blocks: int) -> None:
    expected = full_run(SerialGroup(), name, CpuDevice())
    for result in run_threads(ranks, full_run, name, StrictDevice(), num_blocks):
        assert_close(result, expected, 1e-10)


@pytest.mark.parametrize("form", ["ring", "heads"])
def test_sequences_that_are_cut_over_ranks(form: str) -> None:
    def run(group: Group, device: Device) -> Arrays:
        mesh = make_mesh(group, {"cp": group.size})
        model = build_model(CONFIGS["llama 9/3"], make_site(mesh, dtype="float64", device=device, cp_form=form))
        fill(model.named_params(), std=0.2)
        batch = make_batch(model.config, 2).cut(group.rank, group.size)
        _, ctx = model.loss_forward(batch)
        model.loss_backward(ctx, 1.0)
        sync_gradients((param for _, param in model.named_params()), mesh)
        return gradients(group, model.named_params())

    expected = run(SerialGroup(), CpuDevice())
    for result in run_threads(2, run, StrictDevice()):
        assert_close(result, expected, 1e-10)


@pytest.mark.parametrize("name", ["gpt2", "llama 9/3"])
def test_initial_weights_have_the_same_bits(name: str) -> None:
    groups = SerialGroup()
    found = [
        weights(groups, new_model(CONFIGS[name], make_site(groups, device=device), seed=3).named_params())
        for device in (CpuDevice(), StrictDevice())
    ]
    assert_same_bits(found[1], found[0])


@pytest.mark.parametrize("name", MODELS)
def test_a_pass_waits_for_the_device_only_for_the_loss_and_the_lookups(name: str) -> None:
    """Each transfer to the host waits for all that is queued: losses, and in backward the ids of each lookup."""
    model = make_model(SerialGroup(), CONFIGS[name], device=StrictDevice())
    batch = make_batch(model.config)
    strict_cupy.transfers.reset()
    _, ctx = model.loss_forward(batch)
    assert strict_cupy.transfers.to_host == 1
    model.loss_backward(ctx, 1.0)
    lookups = 2 if "positions" in model.layers else 1
    assert strict_cupy.transfers.to_host == 1 + lookups
