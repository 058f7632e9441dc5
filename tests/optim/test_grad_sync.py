"""What placements call partial is summed, over the right axis and once: gradients of a whole batch on dp x tp ranks."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from mpitp.comm import Group, make_mesh, run_threads
from mpitp.layers import make_site
from mpitp.models import Batch, build_model
from mpitp.optim.grad_norm import GradNorm
from mpitp.optim.grad_sync import sync_gradients
from tests.models.model_cases import CONFIGS, make_batch
from tests.sharded import assert_close, fill, gradients

ROWS = 6


def grads(world: Group, name: str, axes: dict[str, int]) -> dict[str, np.ndarray]:
    """Of the mean loss of six rows, of which each rank of dp has its share."""
    mesh = make_mesh(world, axes)
    site = make_site(mesh, dtype="float64")
    model = build_model(CONFIGS[name], site)
    fill(model.named_params(), std=0.2)
    whole = make_batch(CONFIGS[name], ROWS)
    loss, ctx = model.loss_forward(share_of(whole, mesh["dp"]))
    model.loss_backward(ctx, 1.0 / whole.num_targets)
    sync_gradients((param for _, param in model.named_params()), mesh)
    norm = GradNorm(model.named_params(), site.ranks)()
    return {"norm": np.array(norm)} | gradients(world, model.named_params())


def share_of(batch: Batch, dp: Group) -> Batch:
    """Rows of dp's ranks: 4 and 2 for two of them."""
    bounds = [round(ROWS * 2 * r / 3) for r in range(dp.size)] + [ROWS]
    first, last = (bound * len(batch.tokens) // ROWS for bound in (bounds[dp.rank], bounds[dp.rank + 1]))
    assert batch.targets is not None
    width = len(batch.tokens) // ROWS
    return Batch.of_rows(batch.tokens[first:last].reshape(-1, width), batch.targets[first:last].reshape(-1, width))


@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 1}, {"dp": 2, "tp": 2}, {"dp": 2, "tp": 3}], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "llama 9/3"])
def test_gradients_over_data_equal_one_rank(name: str, axes: dict[str, int]) -> None:
    expected = run_threads(1, grads, name, {})[0]
    for found in run_threads(axes["dp"] * axes["tp"], grads, name, axes):
        assert_close(found, expected, 1e-12)


def test_tensor_parallelism_alone_sums_nothing_here() -> None:
    def calls(world: Group) -> Counter[str]:
        seen: Counter[str] = Counter()
        model = build_model(CONFIGS["llama 9/3"], make_site(world))
        for name in ("all_reduce", "start_all_reduce"):
            setattr(world, name, lambda *args, name=name, **options: seen.update([name]))
        sync_gradients((param for _, param in model.named_params()), model.site.mesh)
        return seen

    assert run_threads(2, calls) == [Counter(), Counter()]
