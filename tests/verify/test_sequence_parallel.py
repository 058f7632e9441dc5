"""`verify` of sequence-parallel layouts: token shards are put together and compared, and a fault on one is placed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import mpitp.layers.norm
from mpitp.backend.arrays import Array
from mpitp.verify.report import summary
from tests.verify.cases import CONFIGS, run_verify


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("model", CONFIGS)
def test_without_a_fault_all_is_equal(model: str, ranks: int) -> None:
    report = run_verify(model, ranks, 2, sequence_parallel=True)
    assert report.ok, summary(report, [], ranks)
    assert len(report.rows) > 50


def test_a_shards_fault_is_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of one rank's shard is wrong, of 21 over 3 ranks."""
    right: Callable[..., tuple[Array, Array]] = mpitp.layers.norm.rms_norm_forward

    def wrong(x: Array, *args: Array) -> tuple[Array, Array]:
        y, rstd = right(x, *args)
        y[-1] *= 1.0 + 1e-6 * (len(x) == 7)
        return y, rstd

    monkeypatch.setattr(mpitp.layers.norm, "rms_norm_forward", wrong)
    first = run_verify("llama", 3, sequence_parallel=True).first("y")
    assert first is not None and first.name == "blocks.0.norm1"
