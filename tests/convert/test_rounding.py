"""Directories whose matrices are rounded to 8 or 4 bits: written, read by any number of ranks, refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitp.checkpoint.hf import Documents, save_model
from mpitp.checkpoint.load import load_model
from mpitp.cli import main
from mpitp.comm import Group, SerialGroup, run_threads
from mpitp.convert.rounding import round_weights
from mpitp.data.tokenizer import byte_tokenizer
from mpitp.errors import ConfigError
from mpitp.infer.generate import generate
from mpitp.infer.schedule import Limits
from mpitp.layers.groupwise import GroupwiseProduct
from mpitp.layers.site import make_site
from mpitp.models import Batch, config_from_hf, new_model
from mpitp.ops.groupwise import BITS, Grouping, widened
from tests.infer.test_engine import PROMPTS, results, written

LLAMA: dict[str, Any] = {
    **{"model_type": "llama", "vocab_size": 257, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 160, "max_position_embeddings": 64},
    **{"tie_word_embeddings": False, "initializer_range": 0.2},
}
TOKENS = np.random.default_rng(3).integers(0, 257, (2, 9))
RANKS = [1, 2, 3, 4, 5, 7]


def save(directory: Path, **changes: Any) -> Path:
    raw = LLAMA | changes
    model = new_model(config_from_hf(raw), make_site(SerialGroup()), seed=5)
    save_model(model, directory, SerialGroup(), Documents(raw, None, byte_tokenizer().files))
    return directory


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "floats")


@pytest.fixture(scope="module", params=BITS)
def rounded(request: pytest.FixtureRequest, floats: Path) -> tuple[Path, Grouping]:
    grouping = Grouping(request.param)
    target = floats.parent / f"int{grouping.bits}"
    round_weights(floats, target, grouping)
    return target, grouping


def loss(group: Group, directory: Path) -> float:
    model = load_model(directory, make_site(group))
    return model.loss_forward(Batch.of_rows(TOKENS[:, :-1], TOKENS[:, 1:]))[0]


@pytest.mark.parametrize("ranks", RANKS)
def test_any_number_of_ranks_reads_its_groups(ranks: int, rounded: tuple[Path, Grouping], floats: Path) -> None:
    directory, grouping = rounded
    alone = loss(SerialGroup(), directory)
    losses = run_threads(ranks, loss, directory)
    np.testing.assert_allclose(losses, alone, rtol=2e-6)
    exact = loss(SerialGroup(), floats)
    assert alone != exact and abs(alone - exact) < (0.002 if grouping.bits == 8 else 0.1) * exact


def test_codes_stand_for_the_nearest_floats(rounded: tuple[Path, Grouping], floats: Path) -> None:
    directory, grouping = rounded
    model, exact = load_model(directory, make_site(SerialGroup())), load_model(floats, make_site(SerialGroup()))
    for name in ("blocks.1.attention.qkv", "blocks.0.mlp.down", "head"):
        product = model[name].product
        assert isinstance(product, GroupwiseProduct)
        of_this = grouping.of_tables if name == "head" else grouping
        w = widened(product.codes.data, product.scales.data, of_this)
        off = np.abs(w - exact[name].product.weight.data).max()
        assert 0 < off <= 1.01 * np.abs(product.scales.data).max() * (0.5 if of_this.bits == 8 else 1.0)
    np.testing.assert_array_equal(model["final_norm"].weight.data, exact["final_norm"].weight.data)


@pytest.mark.parametrize("bits", BITS)
def test_invariant_texts_are_the_same_to_the_bit(bits: int, tmp_path: Path) -> None:
    """Alone and in a crowd that shares beginnings and gives way, on 1 to 4 ranks."""
    floats = save(tmp_path / "floats", max_position_embeddings=128, num_hidden_layers=1)
    round_weights(floats, tmp_path / "rounded", Grouping(bits))
    prompts = [*PROMPTS[:3], PROMPTS[5]]

    def run(group: Group, prompts: Any, limits: Limits, blocks: int) -> Any:
        model = load_model(tmp_path / "rounded", make_site(group, invariant_blocks=4))
        return results(written(group, model, prompts, limits, blocks))

    alone = [run(SerialGroup(), [prompt], Limits(1, 64), 20)[0] for prompt in prompts]
    for ranks in (1, 2, 3, 4):
        assert run_threads(ranks, run, prompts, Limits(4, 11), 7)[0] == alone


@pytest.mark.parametrize("ranks", [1, 3])
def test_texts_and_types(ranks: int, rounded: tuple[Path, Grouping]) -> None:
    def run(group: Group) -> tuple[int, ...]:
        model = load_model(rounded[0], make_site(group))
        model.types()
        return tuple(generate(model, [[1, 2, 3]], 5)[0].tokens)

    assert len(set(run_threads(ranks, run))) == 1


def test_the_command(floats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "--weights", "int4", str(floats), str(tmp_path / "q")]) == 0
    assert "int4, 4.5 bits a weight" in capsys.readouterr().out
    assert json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]["bits"] == 4
    assert (tmp_path / "q" / "tokenizer.json").read_bytes() == (floats / "tokenizer.json").read_bytes()
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (floats, tmp_path / "q")]
    assert sizes[1] < 0.25 * sizes[0]
    assert main(["generate", "--model", str(tmp_path / "q"), "--prompt", "ab", "--max-new-tokens", "3"]) == 0
    assert main(["verify", "--model", str(tmp_path / "q")]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["q"], "nothing else is left"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["convert", "{floats}", "{out}"], 2, "is a directory; it is converted with --weights"),
        (["convert", "--weights", "int8", "--dtype", "float16", "{floats}", "{out}"], 2, "--dtype float16 is for"),
        (["convert", "--weights", "int8", "{int8}", "{out}"], 3, "its weights are rounded already"),
        (["convert", "--weights", "int8", "{gpt2}", "{out}"], 3, "gpt2 stores its matrices transposed"),
        (["convert", "--weights", "int8", "{narrow}", "{out}"], 3, "multiples of 32, head_dim is 16"),
        (["convert", "--weights", "int8", "{out}", "{out}"], 4, "out"),
    ],
)
def test_what_is_refused(
    words: list[str], code: int, said: str, floats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"floats": floats, "out": tmp_path / "out", "int8": tmp_path / "int8"}
    round_weights(floats, places["int8"], Grouping(8))
    gpt2 = {"model_type": "gpt2", "vocab_size": 257, "n_embd": 32, "n_head": 1, "n_layer": 1, "n_positions": 8}
    model = new_model(config_from_hf(gpt2), make_site(SerialGroup()), seed=1)
    save_model(model, tmp_path / "gpt2", SerialGroup(), Documents(gpt2))
    places |= {"gpt2": tmp_path / "gpt2", "narrow": save(tmp_path / "narrow", head_dim=16)}
    assert main([word.format(**places) for word in words]) == code
    assert said in capsys.readouterr().err
    assert not places["out"].exists()


def test_what_is_refused_leaves_no_folders(floats: Path, rounded: tuple[Path, Grouping], tmp_path: Path) -> None:
    (tmp_path / "no.gguf").write_bytes(b"GGUF" + bytes(60))
    out = str(tmp_path / "new/deeper/out")
    for options in (
        ["--weights", "int8", str(rounded[0])],
        ["--weights", "int4", str(tmp_path / "no.gguf")],
        ["--upcycle", "2", str(rounded[0])],
        [str(tmp_path / "no.gguf")],
    ):
        assert main(["convert", *options, out]) in (3, 4)
        assert [path.name for path in tmp_path.iterdir()] == ["no.gguf"], options
    assert main(["convert", "--weights", "int8", str(floats), out]) == 0
    assert [path.name for path in (tmp_path / "new/deeper").iterdir()] == ["out"]


def test_rounded_weights_are_not_trained_or_made_afresh(rounded: tuple[Path, Grouping]) -> None:
    raw = json.loads((rounded[0] / "config.json").read_text())
    with pytest.raises(ConfigError, match="fresh weights are floats"):
        new_model(config_from_hf(raw), make_site(SerialGroup()), seed=1)
    for changes in ({"bits": 5}, {"group_size": 31}, {"zero_point": True}, {"bits": True}):
        entry = raw["quantization_config"] | changes
        with pytest.raises(ConfigError, match="not understood|not supported"):
            config_from_hf(raw | {"quantization_config": entry})
    with pytest.raises(ConfigError, match="quantization_config"):
        config_from_hf(raw | {"quantization_config": {"quant_method": "gptq", "bits": 4}})
