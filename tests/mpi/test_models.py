"""Whole models on real MPI ranks against the one-rank model, which every rank computes for itself."""

from __future__ import annotations

import numpy as np
import pytest

from mpitp.backend.device import CpuDevice
from mpitp.comm import Group, SerialGroup
from mpitp.infer.generate import generate
from mpitp.infer.sampling import Sampling
from tests.models.model_cases import CONFIGS, Arrays, make_model, whole_run
from tests.models.test_dropout import trained
from tests.models.test_invariant import invariant_run
from tests.sharded import StrictDevice, assert_close, assert_same_bits

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in ("gpt2", "llama 7/7")])
def test_float64_equals_one_rank(name: str, world: Group) -> None:
    assert_close(whole_run(world, name), whole_run(SerialGroup(), name), 1e-10)


@pytest.mark.parametrize("name", ["gpt2", "llama 9/3"])
def test_float32_differs_by_rounding(name: str, world: Group) -> None:
    found = whole_run(world, name, "float32", 1e-3)
    assert_close(found, whole_run(SerialGroup(), name, "float32", 1e-3), 2e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits_differ_by_rounding(dtype: str, world: Group) -> None:
    """No library reduces them as they are; moved as they are, summed as float32."""
    found = whole_run(world, "llama 9/3", dtype, 1e-3)
    assert_close(found, whole_run(SerialGroup(), "llama 9/3", dtype, 1e-3), {"bfloat16": 0.1, "float16": 0.0125}[dtype])


@pytest.mark.parametrize("name", ["gpt2", "llama biases, tied, 5/1, llama3"])
def test_dropout_is_the_same(name: str, world: Group) -> None:
    assert_close(trained(world, name), trained(SerialGroup(), name), 1e-10)


@pytest.mark.parametrize("name", ["llama 8/2, tied", "qwen2 6/2, narrow"])
def test_invariant_layout_has_the_bits_of_one_rank(name: str, world: Group) -> None:
    assert_same_bits(invariant_run(world, name), invariant_run(SerialGroup(), name))


def texts(group: Group, name: str) -> Arrays:
    model = make_model(group, CONFIGS[name])
    prompts = [[1, 2, 3, 4, 5], [7], [8, 9, 10]]
    found = {}
    for key, sampling in (("greedy", Sampling()), ("sampled", Sampling(1.3, 20, 0.95, 11))):
        found[key] = np.array([text.tokens for text in generate(model, prompts, 6, sampling, eos_ids=())])
    return found


@pytest.mark.parametrize("name", ["gpt2", "llama 9/3", "qwen2 6/2, tied"])
def test_generated_text_is_the_same(name: str, world: Group) -> None:
    assert_same_bits(texts(world, name), texts(SerialGroup(), name))


@pytest.mark.parametrize("name", ["gpt2", "llama 9/3"])
def test_device_arrays_are_staged_through_the_host(name: str, world: Group) -> None:
    found = whole_run(world, name, device=StrictDevice())
    assert_close(found, whole_run(SerialGroup(), name, device=CpuDevice()), 1e-10)
