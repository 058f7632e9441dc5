"""Weights and activations in 16 bits: near float32's numbers, masters that keep small updates, the loss scale."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from mpitp.backend.arrays import to_host
from mpitp.backend.device import CpuDevice, Device
from mpitp.backend.precision import BFLOAT16, FLOAT16
from mpitp.checkpoint.load import load_model
from mpitp.comm import Group, SerialGroup, run_threads
from mpitp.errors import NumericError
from mpitp.infer.generate import generate
from mpitp.infer.sampling import Sampling
from mpitp.layers.param import Param
from mpitp.layers.site import make_site
from mpitp.models import Batch, CausalLM, config_from_hf, new_model
from mpitp.optim.adamw import AdamW, AdamWSettings
from mpitp.optim.loss_scale import FIRST_SCALE, SMALLEST, LossScale
from mpitp.train.step import StepResult, TrainStep
from tests.models.model_cases import CONFIGS, LLAMA, make_batch
from tests.sharded import StrictDevice
from tests.train.layouts import check_layout
from tests.train.run_case import config, losses, make_data, run

HALF = {"bfloat16": 2**-8, "float16": 2**-11}  # relative steps
DEVICES: dict[str, Device] = {"numpy": CpuDevice(), "strict": StrictDevice()}
SMALL = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
RAW = {**LLAMA, **SMALL, "initializer_range": 0.3}


def make(dtype: str, group: Group | None = None) -> CausalLM:
    return new_model(config_from_hf(RAW), make_site(group or SerialGroup(), dtype=dtype), seed=1)


def batch() -> Batch:
    ids = np.random.default_rng(0).integers(0, 53, (4, 13))
    return Batch.of_rows(ids[:, :-1], ids[:, 1:])


def loss_and_gradients(group: Group, name: str, dtype: str, device: Device) -> tuple[float, dict[str, Any]]:
    model = new_model(CONFIGS[name], make_site(group, dtype=dtype, device=device), seed=1)
    loss, ctx = model.loss_forward(make_batch(model.config))
    model.loss_backward(ctx, 1.0)
    return loss, {name: to_host(param.grad) for name, param in model.named_params()}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["gpt2", "llama biases, tied, 5/1, llama3"])
def test_loss_and_gradients_are_near_those_of_float32(name: str, device: str, dtype: str) -> None:
    """On every rank count; gradients are float32 whatever weights and activations are."""
    expected_loss, expected = loss_and_gradients(SerialGroup(), name, "float32", CpuDevice())
    loss, gradients = loss_and_gradients(SerialGroup(), name, dtype, DEVICES[device])
    assert loss == pytest.approx(expected_loss, rel=HALF[dtype])
    for param, grad in gradients.items():
        assert grad.dtype == np.float32
        assert np.linalg.norm(grad - expected[param]) < 8 * HALF[dtype] * np.linalg.norm(expected[param]), param
    for other, _ in run_threads(3, lambda group: loss_and_gradients(group, name, dtype, DEVICES[device])):
        assert other == pytest.approx(expected_loss, rel=HALF[dtype])


def trained(dtype: str, *, masters: bool = True, lr: float = 4e-4, steps: int = 50) -> tuple[float, float]:
    """First and last loss."""
    model = make(dtype)
    optimizer = AdamW(model.named_params(), AdamWSettings(weight_decay=0.0))
    if not masters:
        optimizer.masters.clear()
    step = TrainStep(model, optimizer, 1.0)
    results = [step([batch()], lr).loss for _ in range(steps)]
    return results[0], results[-1]


def test_training_reaches_float32_s_loss_and_stalls_without_masters() -> None:
    """Within 2 % of the way for both; without float32 masters most of bfloat16's updates are rounded away."""
    first, last = trained("float32")
    way = first - last
    assert abs(trained("bfloat16")[1] - last) < 0.02 * way
    assert abs(trained("float16")[1] - last) < 0.02 * way
    stalled = trained("bfloat16", masters=False)
    assert stalled[0] - stalled[1] < 0.6 * way


def test_the_parameter_is_its_master_rounded() -> None:
    model = make("bfloat16")
    optimizer = AdamW(model.named_params(), AdamWSettings())
    TrainStep(model, optimizer)([batch()], 1e-3)
    for name, param in optimizer.params:
        master = optimizer.masters[name]
        assert (param.data.dtype, master.dtype, optimizer.moments[name][0].dtype) == (BFLOAT16, np.float32, np.float32)
        assert np.array_equal(master.astype(BFLOAT16), param.data) and not np.array_equal(master, param.data)


def overflowing(group: Group) -> tuple[list[StepResult], float, bool]:
    """Three steps, of which the second has an infinite gradient on the last rank alone."""
    model = make("float16", group)
    optimizer = AdamW(model.named_params(), AdamWSettings())
    step, results, kept = TrainStep(model, optimizer), [], True
    accumulate = step.accumulate

    def damaged(batches: Any) -> tuple[float, int]:
        made = accumulate(batches)
        if len(results) == 1 and group.rank == group.size - 1:
            optimizer.params[3][1].grad[0] = np.inf
        return made

    step.accumulate = damaged  # type: ignore[method-assign]
    for _ in range(3):
        before = {name: optimizer.masters[name].copy() for name in optimizer.masters}
        results.append(step([batch()], 1e-3))
        unchanged = all(np.array_equal(before[name], optimizer.masters[name]) for name in before)
        kept &= unchanged == results[-1].skipped
    return results, optimizer.loss_scale.scale, kept and optimizer.steps_done == 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_that_overflows_is_left_out_by_all_ranks(ranks: int) -> None:
    for results, scale, kept in run_threads(ranks, overflowing):
        assert [result.skipped for result in results] == [False, True, False]
        assert scale == FIRST_SCALE / 2 and kept


def test_the_scale_cancels_and_small_gradients_survive_by_it() -> None:
    """Gradients below float16's smallest number are lost, at a scale above it nothing of them is."""

    def norm(dtype: str, scale: float) -> float:
        model = make(dtype)
        optimizer = AdamW(model.named_params(), AdamWSettings())
        optimizer.loss_scale.scale = scale
        return TrainStep(model, optimizer)([batch()], 0.0).grad_norm

    expected = norm("float32", 1.0)
    assert norm("float16", FIRST_SCALE / 16) == pytest.approx(expected, rel=1e-3)
    assert norm("float16", 2.0**-24) < 0.1 * expected


def test_the_scale_grows_after_clean_steps_and_ends_in_an_error() -> None:
    scale = LossScale.of(FLOAT16)
    for _ in range(2000):
        scale.after_clean_step()
    assert (scale.scale, scale.clean_steps) == (2 * FIRST_SCALE, 0)
    scale.scale = SMALLEST
    assert not scale.leaves_out(1.0, np.inf)  # the step then raises NumericError
    assert not LossScale.of(BFLOAT16).leaves_out(1.0, np.inf)
    model = make("float16")
    optimizer = AdamW(model.named_params(), AdamWSettings())
    optimizer.loss_scale.scale = SMALLEST
    param: Param = model["final_norm"].weight
    param.data[...] = np.inf
    with pytest.raises(NumericError, match="training can't go on"):
        TrainStep(model, optimizer)([batch()], 1e-3)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_update_that_leaves_no_finite_weights_ends_the_run(tmp_path: Path, dtype: str) -> None:
    """The last step's too, which no further loss looks at; warnings are errors here."""
    settings = config(make_data(tmp_path), tmp_path / "run", model_dtype=dtype, train_steps=1, optim_lr=1e38)
    with pytest.raises(NumericError, match="held-out loss nan after step 1"):
        run(2, settings)
    assert not (tmp_path / "run" / "model").exists() and not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("dtype", HALF)
def test_a_run_resumes_with_its_masters_and_scale(tmp_path: Path, dtype: str) -> None:
    """The checkpoint is a float32 directory of the masters; the run goes on as if it had never stopped."""
    data = make_data(tmp_path)
    whole = config(data, tmp_path / "whole", model_dtype=dtype, train_steps=6, checkpoint_every=3)
    run(1, whole)
    cut = config(data, tmp_path / "cut", model_dtype=dtype, train_steps=3, checkpoint_every=3)
    run(2, cut)
    saved = tmp_path / "cut" / "checkpoints" / "step-00000003"
    masters = load_file(saved / "model.safetensors")
    assert {m.dtype for m in masters.values()} == {np.dtype(np.float32)}
    assert any(not np.array_equal(m, m.astype(BFLOAT16).astype(np.float32)) for m in masters.values())
    run(1, config(data, tmp_path / "cut", model_dtype=dtype, train_steps=6, checkpoint_every=3), resume="auto")
    assert mean_losses(tmp_path / "cut") == pytest.approx(mean_losses(tmp_path / "whole"), rel=2 * HALF[dtype])
    if dtype == "float16":
        state = json.loads((saved / "state.json").read_text())
        assert state["loss_scale"]["scale"] <= FIRST_SCALE and "loss_scale" in dict(losses(tmp_path / "cut")[-1])


def mean_losses(folder: Path) -> list[float]:
    return [dict(line)["loss"] for line in losses(folder)]


@pytest.mark.parametrize("dtype", HALF)
def test_generation_and_files(tmp_path: Path, dtype: str) -> None:
    """A saved model of 16 bits loads as it is, on any ranks, and goes on with float32's tokens."""
    run(1, config(make_data(tmp_path), tmp_path / "run", train_steps=12, model_save_dtype=dtype))
    prompts = [list(b"To be"), list(b"not to")]

    def completed(group: Group, kind: str) -> list[list[int]]:
        model = load_model(tmp_path / "run" / "model", make_site(group, dtype=kind))
        return [made.tokens for made in generate(model, prompts, 8, Sampling(temperature=0.0))]

    expected = completed(SerialGroup(), "float32")
    assert completed(SerialGroup(), dtype) == expected
    assert run_threads(2, lambda group: completed(group, dtype))[0] == expected


COMPOSED: list[tuple[int, dict[str, Any], dict[str, Any], str]] = [  # ranks, [mesh], other keys, dtype
    (2, {"dp": 2}, {"optim_zero": 1}, "float16"),
    (4, {"dp": 2, "tp": 2}, {"optim_zero": 2}, "bfloat16"),
    (2, {"dp": 2}, {"optim_zero": 3, "train_recompute": "full"}, "bfloat16"),
    (2, {"tp": 2, "sequence_parallel": True}, {"train_recompute": "attention"}, "bfloat16"),
    (2, {"cp": 2}, {}, "float16"),
    (2, {"pp": 2, "schedule": "zb"}, {}, "float16"),
]


@pytest.mark.parametrize(("ranks", "mesh", "keys", "dtype"), COMPOSED, ids=str)
def test_every_axis_has_16_bits(ranks: int, mesh: dict[str, Any], keys: dict[str, Any], dtype: str) -> None:
    """Losses, masters and moments of three steps are those of one rank, but for rounding to 16 bits on the way."""
    check_layout(ranks, mesh, keys, tolerance=8 * HALF[dtype], model_dtype=dtype)


def test_invariant_bits_in_16_bits() -> None:
    check_layout(3, {"tp": 3}, {}, tolerance=0, model_dtype="bfloat16", train_invariant=True)


@pytest.mark.parametrize("saves", [{}, {"checkpoint_every": 1, "train_steps": 2}], ids=["at the end", "on the way"])
def test_weights_that_are_not_finite_are_not_saved(saves: dict[str, int], tmp_path: Path) -> None:
    """Without held-out text nobody sees the last update's loss; the weights are looked at before they are written."""
    spoilt = {"optim_lr": 1e6, "optim_warmup_steps": 0, "optim_min_lr": 1e6, "train_steps": 1}
    settings = config(make_data(tmp_path), tmp_path / "run", model_dtype="float16", **{**spoilt, **saves})
    data, train = replace(settings.data, valid=None), replace(settings.train, eval_every=0)
    settings = replace(settings, data=data, train=train)
    with pytest.raises(NumericError, match=r"aren't finite \(NaN or infinite\) after step 1: they aren't saved"):
        run(2, settings)
    run_dir = Path(settings.train.run_dir)
    assert not (run_dir / "model").exists() and not list((run_dir / "checkpoints").glob("step-*"))
