"""ViT and DINOv2 against PyTorch and transformers, tensor by tensor, on ranks that are threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitp.checkpoint.hf import Documents, save_model
from mpitp.checkpoint.vision import load_vision, load_vision_config
from mpitp.comm import Group, SerialGroup, run_threads
from mpitp.data.images import unfold
from mpitp.layers.patches import bicubic_matrix
from mpitp.layers.rows import Rows
from mpitp.layers.site import make_site
from mpitp.models import Batch
from mpitp.optim.adamw import AdamW, AdamWSettings
from mpitp.optim.grad_sync import sync_gradients
from mpitp.train.step import TrainStep
from tests.parity.global_tensors import global_tensors
from tests.parity.golden_case import CLIP_NORM, LR, Differences, difference, largest, named

GOLDEN = Path(__file__).parent / "golden_vision"
CASES = ["dinov2-other-size", "vit"]
TOLERANCE = 1e-11  # 1e-15 is seen


def compare(group: Group, case: str, num_blocks: int = 0, **options: Any) -> Differences:
    with np.load(GOLDEN / case / "golden.npz") as arrays:
        golden = dict(arrays)
    config = load_vision_config(GOLDEN / case).for_size(golden["pixels"].shape[2])
    site = make_site(group, dtype="float64", invariant_blocks=num_blocks, **options)
    model = load_vision(GOLDEN / case, site, config=config)
    patches = unfold(golden["pixels"], config.patch_size)
    images = len(golden["pixels"])
    batch = Batch(patches, Rows.of([1 + len(patches) // images] * images), golden["targets"])
    logits, _ = model.forward(batch)
    differences = {"logits": difference(model.gather_logits(logits), golden["logits"])}
    loss, ctx = model.loss_forward(batch)
    model.loss_backward(ctx, 1 / images)
    sync_gradients((param for _, param in model.named_params()), model.site.mesh)
    differences["loss"] = difference(loss / images, golden["loss"])
    grads = global_tensors(model, group, "grad", named(golden, "grad/"))
    differences |= {f"grad/{name}": difference(grad, golden[f"grad/{name}"]) for name, grad in grads.items()}
    step = TrainStep(model, AdamW(model.named_params(), AdamWSettings((0.9, 0.95), 1e-8, 0.1)), CLIP_NORM)
    losses = [step([batch], LR).loss for _ in golden["training_losses"]]
    return differences | {"training_losses": difference(losses, golden["training_losses"])}


def test_the_cases_are_there() -> None:
    assert sorted(path.name for path in GOLDEN.iterdir()) == CASES


@pytest.mark.parametrize("case", CASES)
def test_with_sequence_parallelism(case: str) -> None:
    differences = run_threads(3, lambda group: compare(group, case, sequence_parallel=True))[-1]
    assert {name: value for name, value in differences.items() if not value < TOLERANCE} == {}


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("case", CASES)
def test_logits_loss_every_gradient_and_ten_training_steps(case: str, ranks: int) -> None:
    differences = run_threads(ranks, compare, case)[-1]
    print(f"{case} on {ranks}: {largest(differences)}")
    assert {name: value for name, value in differences.items() if not value < TOLERANCE} == {}


@pytest.mark.parametrize("case", CASES)
def test_invariant_blocks_compute_the_same(case: str) -> None:
    differences = run_threads(2, compare, case, 4)[0]
    assert {name: value for name, value in differences.items() if not value < TOLERANCE} == {}


@pytest.mark.parametrize("case", CASES)
def test_what_is_saved_is_loaded_again(case: str, tmp_path: Path) -> None:
    def save(group: Group) -> None:
        model = load_vision(GOLDEN / case, make_site(group, dtype="float64"))
        save_model(model, tmp_path / "model", group, Documents(model.config.hf), save_dtype="float64")

    run_threads(3, save)
    found, expected = (
        {name: param.data for name, param in load_vision(path, make_site(SerialGroup())).named_params()}
        for path in (tmp_path / "model", GOLDEN / case)
    )
    assert found.keys() == expected.keys()
    for name in found:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


def test_resampling_keeps_what_is_even_and_is_exact_for_one_size() -> None:
    np.testing.assert_allclose(bicubic_matrix(16, 37).sum(axis=1), 1.0)
    np.testing.assert_allclose(bicubic_matrix(7, 7), np.eye(7), atol=1e-15)
