"""Sequence-parallel models on 1 to 5 ranks against the plain one-rank model: 21 tokens, which no number of ranks but 3
divides, and fewer tokens than ranks.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from mpitp.comm import Group, SerialGroup, abstract_mesh, run_threads
from mpitp.errors import ConfigError
from mpitp.layers.passes import DropoutState
from mpitp.layers.rows import Rows, Run
from mpitp.layers.site import make_site
from mpitp.models import Batch, abstract_model
from tests.models.model_cases import CONFIGS, Arrays, forward_backward, make_batch, make_model, train
from tests.sharded import assert_close, assert_same_bits

NAMES = ["gpt2", "gpt2 untied", "llama 9/3", "llama biases, tied, 5/1, llama3"]


def run(group: Group, name: str, **options: Any) -> Arrays:
    """Forward, backward and three steps, dropout in force."""
    model = make_model(group, CONFIGS[name], **options)
    result = forward_backward(
        model, [make_batch(model.config, dropout=DropoutState(3, 1)), make_batch(model.config, 1)]
    )
    model.zero_grad()
    return result | train(model, steps=3, dropout=True)


@cache
def one_rank(name: str) -> Arrays:
    return run(SerialGroup(), name)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("name", NAMES)
def test_equals_one_rank(name: str, ranks: int) -> None:
    for result in run_threads(ranks, lambda group: run(group, name, sequence_parallel=True)):
        assert_close(result, one_rank(name), 1e-10)


def few_tokens(group: Group, name: str, tokens: int, **options: Any) -> Arrays:
    model = make_model(group, CONFIGS[name], **options)
    ids = [[5, 2, 3, 1][: tokens + 1]]
    return forward_backward(model, [Batch.of_rows([row[:-1] for row in ids], [row[1:] for row in ids])])


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("name", ["gpt2", "llama 9/3"])
def test_fewer_tokens_than_ranks(name: str, tokens: int) -> None:
    expected = few_tokens(SerialGroup(), name, tokens)
    for result in run_threads(4, lambda group: few_tokens(group, name, tokens, sequence_parallel=True)):
        assert_close(result, expected, 1e-10)


def test_the_mask_of_dropout_is_that_of_the_global_rows() -> None:
    rows = Rows.of([3, 4], samples=[5, 9]).part(range(2, 6))
    assert rows.runs == (Run(5, 2, 1, 0), Run(9, 0, 3, 1))
    assert rows.positions().tolist() == [2, 0, 1, 2]
    assert Rows.of([3]).part(range(3, 3)).num_tokens == 0


def test_a_group_of_one_rank_is_the_plain_model_to_the_bit() -> None:
    assert_same_bits(run(SerialGroup(), "gpt2", sequence_parallel=True), one_rank("gpt2"))


def test_types() -> None:
    site = make_site(abstract_mesh({"dp": 2, "tp": 3}), sequence_parallel=True)
    types = abstract_model(CONFIGS["gpt2"], site).types()
    assert str(types["blocks.0.norm1"].outgoing) == "V along dp, V along tp"
    assert str(types["head"].incoming) == "V along dp, V along tp" and types["head"].incoming.columns == ()
    assert str(types["loss"].outgoing) == "V along dp, I along tp"


def test_invariant_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="sequence parallelism has no invariant mode"):
        make_site(SerialGroup(), invariant_blocks=2, sequence_parallel=True)
