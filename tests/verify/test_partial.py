"""A parameter whose gradient backward leaves as a summand: verify compares it when it is summed, as a step does."""

from __future__ import annotations

import pytest

from mpitp.comm import Group, SerialGroup, run_threads
from mpitp.errors import ConfigError
from mpitp.layers import Cut, Site, make_site
from mpitp.models import CausalLM, build_model
from mpitp.optim.adamw import AdamW, AdamWSettings
from mpitp.train.step import TrainStep
from mpitp.verify.batches import random_batch
from mpitp.verify.command import default_tolerance
from mpitp.verify.run import FiniteDifference, Report, Settings, finite_differences, verify
from tests.layers.test_product import low_rank
from tests.sharded import fill
from tests.verify.cases import CONFIGS

CONFIG = CONFIGS["llama"]


def make(site: Site) -> CausalLM:
    """Its first MLP ends in W = A B, of which A [h, r] is on every rank."""
    model = build_model(CONFIG, site)
    cuts = (Cut.whole(CONFIG.hidden_size), Cut.of(site.share(CONFIG.ffn_hidden)))
    model["blocks.0.mlp.down"].product = low_rank(site, cuts)
    fill(model.named_params(), std=0.2)
    model.types()
    return model


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_gradient_that_is_partial_is_compared_when_it_is_summed(ranks: int) -> None:
    def run(group: Group) -> tuple[Report, list[FiniteDifference]]:
        site, batch = make_site(group, dtype="float64"), random_batch(CONFIG, batch=2, seq=7, seed=1)
        settings = Settings(default_tolerance("float64", is_exact=False), steps=2)
        return verify(site, make, batch, settings), finite_differences(make(site), batch, 60)

    report, checks = run_threads(ranks, run)[0]
    assert [row for row in report.rows if not row.ok] == []
    assert {(f"blocks.0.mlp.down.{name}", kind) for name in "ab" for kind in ("grad", "update")} <= {
        (row.name, row.kind) for row in report.rows
    }
    assert [check for check in checks if not check.ok] == []
    assert any(check.name == "blocks.0.mlp.down.a" for check in checks)


def test_the_invariant_mode_does_not_train_it() -> None:
    """On one rank neither: its bits would be those of no other number of ranks."""
    model = make(make_site(SerialGroup(), invariant_blocks=3))
    with pytest.raises(ConfigError, match=r"blocks\.0\.mlp\.down\.a: its gradient is partial along tp"):
        TrainStep(model, AdamW(model.named_params(), AdamWSettings()))
