"""What a model refuses, how it starts, and the facts it tells about itself."""

from __future__ import annotations

import numpy as np
import pytest

from mpitp.comm import Group, SerialGroup, run_threads
from mpitp.errors import ConfigError
from mpitp.layers.site import make_site
from mpitp.models import Batch, config_from_hf, new_model
from tests.models.model_cases import CONFIGS, GPT2, RAW, make_batch, make_model
from tests.sharded import assert_same_bits, weights


@pytest.mark.parametrize("name", ["gpt2", "llama 9/3"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_ids_outside_the_vocabulary(name: str, ranks: int) -> None:
    def check(group: Group) -> None:
        model = make_model(group, CONFIGS[name])
        for bad in (53, 10**9, -1):
            with pytest.raises(ConfigError, match=f"token id {bad} lies outside the model's vocabulary of 53"):
                model.forward(Batch.of_rows([[1, bad]]))
        with pytest.raises(ConfigError, match="token id 53 lies outside"):
            model.loss_forward(Batch.of_rows([[1, 2]], [[2, 53]]))
        model.loss_forward(Batch.of_rows([[1, 2]], [[2, -100]]))

    run_threads(ranks, check)


@pytest.mark.parametrize("name", ["gpt2", "llama 9/3"])
def test_sequences_that_do_not_fit(name: str) -> None:
    model = make_model(SerialGroup(), CONFIGS[name])
    model.forward(Batch.of_rows([[1] * 24]))
    with pytest.raises(ConfigError, match="a sequence of 25 tokens exceeds the model's 24 positions"):
        model.forward(Batch.of_rows([[1] * 25]))
    with pytest.raises(ConfigError, match="25 tokens exceeds"):
        model.next_logits(Batch.of_lists([[1, 1]], (23,)), model.new_caches([30]))
    for empty in (Batch.of_lists([]), Batch.of_lists([[1], []])):
        with pytest.raises(ConfigError, match="a sequence without tokens"):
            model.forward(empty)


def test_targets_that_do_not_count_change_nothing() -> None:
    model = make_model(SerialGroup(), CONFIGS["gpt2"])
    tokens = [[1, 2, 3, 4]]
    losses = [model.loss_forward(Batch.of_rows(tokens, [row]))[0] for row in ([5, -1, -1, 7], [5, -1, -9, -1])]
    single = model.loss_forward(Batch.of_rows(tokens, [[-1, -1, -1, 7]]))[0]
    assert losses[0] == pytest.approx(losses[1] + single, rel=1e-14)
    assert Batch.of_rows(tokens, [[5, -1, -9, 7]]).num_targets == 2 and Batch.of_rows(tokens).num_targets == 0
    loss, ctx = model.loss_forward(Batch.of_rows(tokens, [[-1] * 4]))
    model.loss_backward(ctx, 1.0)
    assert loss == 0.0
    assert all(not param.grad.any() for _, param in model.named_params())


def test_a_batch_of_unequal_sequences_equals_the_single_ones() -> None:
    model = make_model(SerialGroup(), CONFIGS["llama 9/3"])
    texts = [[1, 2, 3, 4, 5], [6], [7, 8]]
    together, _ = model.forward(Batch.of_lists(texts))
    alone = [model.forward(Batch.of_lists([text]))[0] for text in texts]
    np.testing.assert_allclose(together, np.concatenate(alone), rtol=0, atol=1e-13)


def test_later_tokens_do_not_change_earlier_logits() -> None:
    for name in ("gpt2", "llama 9/3"):
        model = make_model(SerialGroup(), CONFIGS[name])
        a, _ = model.forward(Batch.of_lists([[1, 2, 3, 4, 5]]))
        b, _ = model.forward(Batch.of_lists([[1, 2, 3, 9, 9]]))
        np.testing.assert_allclose(a[:3], b[:3], rtol=0, atol=1e-13)
        assert np.abs(a[3:] - b[3:]).max() > 1e-3


def initial(group: Group, name: str, num_blocks: int = 0, seed: int = 5) -> dict[str, np.ndarray]:
    model = new_model(CONFIGS[name], make_site(group, invariant_blocks=num_blocks), seed=seed)
    return weights(group, model.named_params())


@pytest.mark.parametrize("name", CONFIGS)
def test_initial_weights_have_the_same_bits_on_any_number_of_ranks(name: str) -> None:
    expected = initial(SerialGroup(), name)
    for ranks in (2, 3, 7):
        assert_same_bits(run_threads(ranks, initial, name)[ranks - 1], expected)
    assert_same_bits(run_threads(2, initial, name, 3)[0], expected)


def test_initial_weights_are_as_the_config_says() -> None:
    found = initial(SerialGroup(), "gpt2")
    assert found["final_norm.weight/"].tolist() == [1.0] * 12 and not found["final_norm.bias/"].any()
    big = new_model(config_from_hf({**GPT2, "n_embd": 120, "n_layer": 8}), make_site(SerialGroup()), seed=0)
    stds = {name: param.data.std() for name, param in big.named_params()}
    assert stds["blocks.0.mlp.up.weight"] == pytest.approx(0.02, rel=0.05)
    assert stds["blocks.0.mlp.down.weight"] == pytest.approx(0.02 / 4, rel=0.05), "by the root of 2 x 8 branches"
    other = initial(SerialGroup(), "gpt2", seed=6)
    assert (other["embedding.weight/vocab"] != found["embedding.weight/vocab"]).mean() > 0.99
    assert len({array.tobytes() for array in found.values() if array.std() and array.size > 1}) == sum(
        1 for array in found.values() if array.std() and array.size > 1
    ), "no two tensors are alike"


@pytest.mark.parametrize("name", CONFIGS)
def test_every_part_of_every_parameter_has_a_place_in_the_files(name: str) -> None:
    model = make_model(SerialGroup(), CONFIGS[name])
    named = dict(model.named_params())
    assert len(named) == len(list(model.named_params()))
    parts = {(key, part.name) for key, param in named.items() for part in param.placement.parts}
    assert parts == set(model.hf_pieces())
    assert ("head.weight" in named) == (not model.config.tied)
    assert dict(model.config.hf) == RAW[name]


@pytest.mark.parametrize("name", ["gpt2", "llama biases, tied, 5/1, llama3"])
def test_weight_decay_is_for_matrices(name: str) -> None:
    model = make_model(SerialGroup(), CONFIGS[name])
    assert all(param.decay == (param.data.ndim == 2) for _, param in model.named_params())


def test_tied_embedding_gets_both_gradients() -> None:
    """The gradient of a tied table is that of the embedding plus that of the head of the same model untied."""
    tied = make_model(SerialGroup(), CONFIGS["gpt2"])
    untied = make_model(SerialGroup(), config_from_hf({**GPT2, "tie_word_embeddings": False}))
    dict(untied.named_params())["head.weight"].data[...] = untied["embedding"].weight.data
    for model in (tied, untied):
        _, ctx = model.loss_forward(make_batch(model.config))
        model.loss_backward(ctx, 1.0)
    embedding, head = untied["embedding"].weight, untied["head"].product.weight
    assert head.grad is not None and embedding.grad is not None
    both = embedding.grad + head.grad
    np.testing.assert_allclose(tied["embedding"].weight.grad, both, rtol=0, atol=1e-13)


def test_zero_grad() -> None:
    model = make_model(SerialGroup(), CONFIGS["gpt2"])
    _, ctx = model.loss_forward(make_batch(model.config))
    model.loss_backward(ctx, 1.0)
    model.zero_grad()
    assert all(param.grad is None for _, param in model.named_params())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_dtype_is_kept(dtype: str) -> None:
    for name in ("gpt2", "llama biases, tied, 5/1, llama3"):
        model = make_model(SerialGroup(), CONFIGS[name], dtype)
        logits, _ = model.forward(make_batch(model.config))
        _, ctx = model.loss_forward(make_batch(model.config))
        model.loss_backward(ctx, 0.5)
        caches = model.new_caches([3])
        model.next_logits(Batch.of_lists([[1, 2]]), caches)
        sizes = [cache.nbytes for cache in caches._of_layer.values()]
        assert sizes == [
            2 * 3 * len(b.attention.heads.heads.kv) * model.config.head_dim * model.dtype.itemsize for b in model.blocks
        ]
        assert logits.dtype == dtype
        assert all(param.grad.dtype == dtype for _, param in model.named_params())
