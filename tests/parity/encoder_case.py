"""One golden encoder computed by mpitp on any group, without padding, as differences from the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mpitp.checkpoint.encoder import load_encoder
from mpitp.comm import Group, make_mesh
from mpitp.layers.rows import Rows
from mpitp.layers.site import make_site
from mpitp.models import Batch
from mpitp.optim.adamw import AdamW, AdamWSettings
from mpitp.optim.grad_sync import sync_gradients
from mpitp.train.step import TrainStep
from tests.parity.global_tensors import global_tensors
from tests.parity.golden_case import CLIP_NORM, LR, Differences, Golden, difference, named

ENCODERS = Path(__file__).parent / "golden_encoders"
ENCODER_CASES = sorted(path.name for path in ENCODERS.iterdir() if path.is_dir())


def encoder_arrays(case: str) -> Golden:
    """What the reference computed."""
    with np.load(ENCODERS / case / "golden.npz") as arrays:
        return dict(arrays)


def batch_of(golden: Golden) -> Batch:
    """The texts, one after the other."""
    rows = Rows.of([int(length) for length in golden["lengths"]])
    return Batch(golden["input_ids"], rows, golden["targets"], types=golden.get("token_type_ids"))


def compare_encoder(group: Group, case: str, dtype: str = "float64", num_blocks: int = 0, **site: Any) -> Differences:
    """Logits, loss, every gradient and ten training losses. Every rank gets the same answer."""
    golden = encoder_arrays(case)
    model = load_encoder(ENCODERS / case, make_site(group, dtype=dtype, invariant_blocks=num_blocks, **site))
    batch = batch_of(golden)
    logits, _ = model.forward(batch)
    differences = {"logits": difference(model.gather_logits(logits), golden["logits"])}
    loss, ctx = model.loss_forward(batch)
    model.loss_backward(ctx, 1 / batch.num_targets)
    sync_gradients((param for _, param in model.named_params()), model.site.mesh)
    differences["loss"] = difference(loss / batch.num_targets, golden["loss"])
    grads = global_tensors(model, group, "grad", named(golden, "grad/"))
    differences |= {f"grad/{name}": difference(grad, golden[f"grad/{name}"]) for name, grad in grads.items()}
    step = TrainStep(model, AdamW(model.named_params(), AdamWSettings((0.9, 0.95), 1e-8, 0.1)), CLIP_NORM)
    losses = [step([batch], LR).loss for _ in golden["training_losses"]]
    return differences | {"training_losses": difference(losses, golden["training_losses"])}


def compare_cut(group: Group, case: str, cp_form: str) -> Differences:
    """Loss and every gradient with the texts cut over all ranks."""
    golden, mesh = encoder_arrays(case), make_mesh(group, {"cp": group.size})
    model = load_encoder(ENCODERS / case, make_site(mesh, dtype="float64", cp_form=cp_form))
    batch = batch_of(golden).cut(group.rank, group.size)
    loss, ctx = model.loss_forward(batch)
    model.loss_backward(ctx, 1 / batch.whole_targets)
    sync_gradients((param for _, param in model.named_params()), mesh)
    total = float(group.all_reduce(np.array([loss]))[0])
    grads = global_tensors(model, group, "grad", named(golden, "grad/"))
    differences = {f"grad/{name}": difference(grad, golden[f"grad/{name}"]) for name, grad in grads.items()}
    return differences | {"loss": difference(total / batch.whole_targets, golden["loss"])}
