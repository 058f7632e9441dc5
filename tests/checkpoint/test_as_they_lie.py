"""Directories of every type as they really lie about: names without their first word or behind a wrapper's, buffers of
older versions, keys of other programs, and pickled weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from mpitp.checkpoint.encoder import load_encoder
from mpitp.checkpoint.encoder_decoder import load_encoder_decoder
from mpitp.checkpoint.hf_directory import read_config
from mpitp.checkpoint.load import load_model
from mpitp.checkpoint.vision import load_vision
from mpitp.comm import SerialGroup
from mpitp.errors import FileError
from mpitp.layers.site import make_site
from mpitp.models.encoder_decoders import is_encoder_decoder
from mpitp.models.encoders import is_encoder
from mpitp.models.vision_config import is_vision

PARITY = Path(__file__).resolve().parent.parent / "parity"
SOURCES = sorted(file.parent for file in PARITY.glob("golden*/*/model.safetensors"))
FIRST_WORDS = ("transformer", "model", "gpt_neox", "bert", "roberta", "distilbert", "vit", "dinov2")
TRIANGLE, NUMBERS = np.ones((1, 1, 4, 4), np.float32), np.arange(4, dtype=np.float32)
INV_FREQ = {"model.layers.0.self_attn.rotary_emb.inv_freq": NUMBERS}
POSITIONS = {"embeddings.position_ids": np.arange(4)[None]}
BUFFERS: dict[str, dict[str, np.ndarray]] = {  # of versions of transformers that stored them
    **dict.fromkeys(("llama", "mistral", "qwen2", "phi3", "stablelm", "mixtral", "gemma"), INV_FREQ),
    "gpt2": {"transformer.h.0.attn.bias": TRIANGLE, "transformer.h.0.attn.masked_bias": NUMBERS[:1]},
    "gpt_neox": {
        "gpt_neox.layers.0.attention.bias": TRIANGLE,
        "gpt_neox.layers.0.attention.masked_bias": NUMBERS[:1],
        "gpt_neox.layers.0.attention.rotary_emb.inv_freq": NUMBERS,
    },
    "bert": {f"bert.{name}": array for name, array in POSITIONS.items()},
    "roberta": {f"roberta.{name}": array for name, array in POSITIONS.items()},
}


def loader(raw: Mapping[str, Any]) -> Callable[..., Any]:
    """What reads a directory of the kind."""
    if is_vision(raw):
        return load_vision
    return load_encoder if is_encoder(raw) else load_encoder_decoder if is_encoder_decoder(raw) else load_model


def without_first_word(name: str) -> str:
    first, _, rest = name.partition(".")
    return rest if first in FIRST_WORDS else name


@pytest.mark.parametrize(
    "rename", [str, without_first_word, "module.{}".format], ids=["as saved", "without their first word", "wrapped"]
)
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_the_same_weights_are_found(source: Path, rename: Callable[[str], str], tmp_path: Path) -> None:
    raw = read_config(source)
    tensors = safetensors.numpy.load_file(source / "model.safetensors") | BUFFERS.get(raw["model_type"], {})
    shutil.copytree(source, tmp_path / "found")
    safetensors.numpy.save_file(
        {rename(name): array for name, array in tensors.items()}, tmp_path / "found" / "model.safetensors"
    )
    others = {key: value for key, value in raw.items() if key != "dtype"}
    others |= {"torch_dtype": "float16", "_name_or_path": "somewhere", "use_cache": False, "of_another_program": 3}
    (tmp_path / "found" / "config.json").write_text(json.dumps(others))
    load, site = loader(raw), make_site(SerialGroup())
    found, expected = load(tmp_path / "found", site), load(source, site)
    for (name, a), (_, b) in zip(found.named_params(), expected.named_params(), strict=True):
        np.testing.assert_array_equal(a.data, b.data, name)
    assert any("of_another_program" in notice for notice in found.config.notices)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_pickled_weights_are_refused_with_the_way_to_convert_them(source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "pickled")
    (tmp_path / "pickled" / "model.safetensors").rename(tmp_path / "pickled" / "pytorch_model.bin")
    raw = read_config(source)
    words = rf"pickled weights can run code.*import {raw['architectures'][0]} as M; M.from_pretrained.*save_pretrained"
    with pytest.raises(FileError, match=words):
        loader(raw)(tmp_path / "pickled", make_site(SerialGroup()))
