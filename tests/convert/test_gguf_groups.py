"""4-bit matrices of GGUF files, kept with their least values: the gguf package's floats to the bit, on any ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.numpy

from mpitp.checkpoint.load import load_model
from mpitp.cli import main
from mpitp.comm import Group, SerialGroup, run_threads
from mpitp.convert.gguf_groups import _READERS
from mpitp.infer.generate import generate
from mpitp.infer.schedule import Limits
from mpitp.layers.groupwise import GroupwiseProduct
from mpitp.layers.site import make_site
from mpitp.ops.groupwise import Grouping, widened
from tests.convert.test_gguf import bpe_vocabulary, write_gguf
from tests.convert.test_rounding import loss
from tests.infer.test_engine import PROMPTS, results, written

KIND = gguf.GGMLQuantizationType
WITH_LEAST = Grouping(4, has_least=True)
WIDTH, HEAD_DIM, VOCAB = 256, 64, len(bpe_vocabulary()[0])
SIZES = {
    **{"llama__embedding_length": WIDTH, "llama__feed_forward_length": WIDTH, "llama__block_count": 1},
    **{"llama__attention__key_length": HEAD_DIM, "llama__attention__value_length": HEAD_DIM},
    "llama__rope__dimension_count": HEAD_DIM,
}
MATRICES = {  # of the block: rows, and how they are stored
    "self_attn.q_proj": (256, KIND.Q4_K),
    "self_attn.k_proj": (128, KIND.Q4_1),
    "self_attn.v_proj": (128, KIND.Q4_0),
    "self_attn.o_proj": (256, KIND.Q4_K),
    "mlp.gate_proj": (256, KIND.Q4_1),
    "mlp.up_proj": (256, KIND.Q4_K),
    "mlp.down_proj": (256, KIND.Q8_0),
}


def stored(kind: Any, n: int, seed: int) -> np.ndarray:
    """Rows of WIDTH weights of about 0.05, as bytes of any pattern but for the float16 that begin a block."""
    rng, (weights, length) = np.random.default_rng(seed), gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (n, WIDTH // weights, length), np.uint8)
    size = {KIND.Q4_K: 1e-4, KIND.Q8_0: 5e-4}.get(kind, 8e-3)
    halves = [rng.uniform(size / 2, size, blocks.shape[:2]), rng.uniform(0, size, blocks.shape[:2])]
    if kind == KIND.Q4_1:
        halves[1] *= -8
    for i, numbers in enumerate(halves[: 1 if kind in (KIND.Q4_0, KIND.Q8_0) else 2]):
        blocks[:, :, 2 * i : 2 * i + 2] = numbers.astype("<f2")[..., None].view(np.uint8)
    return blocks.reshape(n, -1)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The file's model in floats, and in 4 bits."""
    folder, rng = tmp_path_factory.mktemp("gguf"), np.random.default_rng(2)
    tensors: dict[str, Any] = {"model.embed_tokens.weight": rng.standard_normal((VOCAB, WIDTH), np.float32)}
    tensors |= {"model.norm.weight": np.ones(WIDTH, np.float32)}
    tensors |= {f"model.layers.0.{norm}_layernorm.weight": np.ones(WIDTH, np.float32) for norm in NORMS}
    blocks = {}
    for i, (name, (n, kind)) in enumerate(MATRICES.items()):
        blocks[f"model.layers.0.{name}.weight"] = (stored(kind, n, i), kind)
    write_gguf(folder / "model.gguf", tensors | dict.fromkeys(blocks), blocks=blocks, **SIZES)
    assert main(["convert", str(folder / "model.gguf"), str(folder / "floats")]) == 0
    assert main(["convert", "--weights", "int4", str(folder / "model.gguf"), str(folder / "int4")]) == 0
    return folder / "floats", folder / "int4"


NORMS = ("input", "post_attention")


@pytest.mark.parametrize("kind", _READERS)
def test_groups_are_the_floats_of_the_gguf_package_to_the_bit(kind: str) -> None:
    rows = stored(KIND[kind], 40, 7)
    found = widened(*_READERS[kind](rows), WITH_LEAST)
    np.testing.assert_array_equal(found, gguf.quants.dequantize(rows, KIND[kind]))


def test_matrices_are_kept_and_others_rounded(converted: tuple[Path, Path]) -> None:
    floats, int4 = converted
    entry = json.loads((int4 / "config.json").read_text())["quantization_config"]
    assert (entry["bits"], entry["symmetric"], entry["table_bits"]) == (4, False, 8)
    exact, saved = (safetensors.numpy.load_file(each / "model.safetensors") for each in converted)
    for name, (n, kind) in MATRICES.items():
        name = f"model.layers.0.{name}.weight"
        codes, scales = saved[name], saved[f"{name}_scale"]
        assert (codes.shape, codes.dtype) == ((n, WIDTH // 2), np.uint8)
        assert (scales.shape, scales.dtype) == ((n, WIDTH // 16), np.float32)
        w = widened(codes, scales, WITH_LEAST)
        if kind == KIND.Q8_0:
            assert 0 < np.abs(w - exact[name]).max() <= 0.6 * scales[:, ::2].max()
        else:
            np.testing.assert_array_equal(w, exact[name])
    table = saved["model.embed_tokens.weight"], saved["model.embed_tokens.weight_scale"]
    assert (table[0].dtype, table[1].dtype) == (np.int8, np.float16)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_any_number_of_ranks_reads_its_groups(ranks: int, converted: tuple[Path, Path]) -> None:
    floats, int4 = converted
    alone = loss(SerialGroup(), int4)
    np.testing.assert_allclose(run_threads(ranks, loss, int4), alone, rtol=2e-6)
    exact = loss(SerialGroup(), floats)
    assert alone != exact and abs(alone - exact) < 0.05 * exact


def test_invariant_texts_are_the_same_to_the_bit(converted: tuple[Path, Path]) -> None:
    """Alone and in a crowd, on 1 to 3 ranks."""
    prompts = [*PROMPTS[:3], PROMPTS[5]]

    def run(group: Group, prompts: Any, limits: Limits, blocks: int) -> Any:
        model = load_model(converted[1], make_site(group, invariant_blocks=4))
        return results(written(group, model, prompts, limits, blocks))

    alone = [run(SerialGroup(), [prompt], Limits(1, 64), 20)[0] for prompt in prompts]
    for ranks in (1, 2, 3):
        assert run_threads(ranks, run, prompts, Limits(4, 11), 7)[0] == alone


def test_the_programs_take_it(converted: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, int4 = converted
    model = load_model(int4, make_site(SerialGroup()))
    product = model["blocks.0.mlp.down"].product
    assert isinstance(product, GroupwiseProduct) and product.shape == (WIDTH, WIDTH)
    assert len(generate(model, [[1, 2, 3]], 3)[0].tokens) == 3
    assert main(["generate", "--model", str(int4), "--prompt", "ab", "--max-new-tokens", "3"]) == 0
    assert main(["verify", "--model", str(int4)]) == 0
    assert "ok" in capsys.readouterr().out.lower()
