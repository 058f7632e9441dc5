"""The benchmark of all types of models, small."""

from __future__ import annotations

import argparse

import pytest

from mpitp.bench import kinds
from mpitp.bench.command import add_arguments
from mpitp.bench.products import attention_products, linear_products, patch_products
from mpitp.cli import main
from mpitp.comm import SerialGroup
from mpitp.layers.site import make_site
from mpitp.models.vision import Vision

SMALL = ["types", "--layers", "1", "--hidden", "16", "--heads", "2", "--ffn", "12", "--vocab", "16", "--batch", "2"]
SMALL += ["--seq", "4", "--rounds", "1"]


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args([*SMALL, *words])


def test_every_type_is_measured() -> None:
    facts = kinds.measure(parsed(), SerialGroup())
    assert set(facts["types"]) == set(kinds.TYPES)
    lines = kinds.report(facts)
    assert len(lines) == 3 + len(kinds.TYPES)
    for own in facts["types"].values():
        assert own["step_to_floor"]["least"] > 0 and own["parameters"] > 0


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_products_are_those_of_the_type(name: str) -> None:
    """By hand: q, k, v, out, the MLP (gated or not), the head on 8 rows; an encoder sees all 4 x 4 scores of a head."""
    args = parsed()
    model = kinds.model_of(name, args, make_site(SerialGroup()))
    gates = 3 if name == "llama" else 2
    weights = (
        4 * 16 * 16 + gates * 16 * 12 + 16 * 16 + (16 * 16 if name == "bert" else 0)
    )  # the masked head's transform
    assert sum(product.flops for product in linear_products(model, 8)) == 3 * 2 * 8 * weights
    scores = 7 * 2 * 4 * 4 * 8  # seven products of a head's 4 queries, 4 keys and 8 columns: one tile
    assert sum(product.flops for product in attention_products(model, [4, 4])) == 2 * 2 * scores


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_products_of_pairs_are_those_of_both_sides(name: str) -> None:
    """An MLP on each side, three attentions, the table as head; one tile of scores each, whatever is seen of it."""
    model = kinds.model_of(name, parsed(), make_site(SerialGroup()))
    weights = 3 * 4 * 16 * 16 + 2 * (3 if name == "t5" else 2) * 16 * 12 + 16 * 16
    assert sum(product.flops for product in linear_products(model, 8)) == 3 * 2 * 8 * weights
    scores = 7 * 2 * 4 * 4 * 8
    assert sum(product.flops for product in attention_products(model, [4, 4])) == 3 * 2 * 2 * scores


def test_products_of_images_are_those_of_patches_and_blocks() -> None:
    """4 patches of 16 x 16 pixels in 3 colours and the class token; no gradient of pixels, and 5 x 5 scores."""
    model = kinds.model_of("vit", parsed(), make_site(SerialGroup()))
    assert isinstance(model, Vision) and kinds.images_of(model, parsed()).tokens.shape == (2 * 4, 3 * 16 * 16)
    weights = 4 * 16 * 16 + 2 * 16 * 12
    assert sum(product.flops for product in linear_products(model, 10)) == 3 * 2 * 10 * weights
    assert sum(product.flops for product in patch_products(model, 8)) == 2 * 2 * 8 * 16 * 768
    assert sum(product.flops for product in attention_products(model, [5, 5])) == 2 * 2 * 7 * 2 * 5 * 5 * 8


def test_a_type_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *SMALL, "--only", "llama,lama"]) == 2
    assert "--only 'lama': no such type; there are gpt2, llama" in capsys.readouterr().err
