"""Rows for the tokens that were added to a tokenizer: a model with a larger vocabulary.

    E' = [E; m, ..., m]    m = the mean of E's rows: what is known of a token before training is what tokens are like

The same for a head of its own and for a bias of the logits. Then a new token's logit is the mean of the others (Hewitt
2021, "Initializing new word embeddings for pretrained language models"), and logits of the old tokens stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpitp.checkpoint.encoder import load_encoder, load_encoder_config
from mpitp.checkpoint.encoder_decoder import load_encoder_decoder, load_encoder_decoder_config
from mpitp.checkpoint.hf import Documents, save_model
from mpitp.checkpoint.hf_directory import read_config, read_generation_config
from mpitp.checkpoint.load import load_config, load_model
from mpitp.comm.serial import SerialGroup
from mpitp.convert.documents import beside
from mpitp.data.tokenizer import check_fits, load_tokenizer
from mpitp.errors import ConfigError
from mpitp.layers.param import Param
from mpitp.layers.site import Site, make_site
from mpitp.models import build_model, config_from_hf
from mpitp.models.encoder_decoders import build_encoder_decoder, encoder_decoder_config_from_hf
from mpitp.models.encoders import build_encoder, encoder_config_from_hf
from mpitp.models.kinds import is_encoder, is_encoder_decoder

VOCAB = "vocab"  # what a part of a parameter is called whose rows are the vocabulary's


@dataclass(frozen=True, slots=True)
class _Kind:
    """How models of a kind are read from a directory and built from a config.json."""

    check: Callable[[str | Path], Any]
    load: Callable[[str | Path, Site], Any]
    config: Callable[[Mapping[str, Any]], Any]
    build: Callable[[Any, Site], Any]


_DECODER = _Kind(load_config, load_model, config_from_hf, build_model)
_ENCODER = _Kind(load_encoder_config, load_encoder, encoder_config_from_hf, build_encoder)
_PAIR = _Kind(load_encoder_decoder_config, load_encoder_decoder, encoder_decoder_config_from_hf, build_encoder_decoder)


def resize_vocabulary(
    source: str | Path, directory: str | Path, *, dtype: str = "float32", overwrite: bool = False
) -> tuple[int, int]:
    """Write `directory`, the model of `source` with a row for each token of its tokenizer; its rows before and now.

    Both are in memory. Raises ConfigError where every token has a row, and for weights that are rounded.
    """
    raw, tokenizer = read_config(source), load_tokenizer(source)
    kind = _ENCODER if is_encoder(raw) else _PAIR if is_encoder_decoder(raw) else _DECODER
    before, rows = kind.check(source), tokenizer.vocab_size
    check_fits(tokenizer, before.vocab_size, str(source))
    if rows <= before.vocab_size:
        raise ConfigError(
            f"{source} has {before.vocab_size} rows, and its tokenizer {rows} tokens: each has one already"
        )
    if getattr(before, "grouping", None) is not None:
        raise ConfigError(f"the weights in {source} are rounded; resize the vocabulary of the model in floats")
    site, raw = make_site(SerialGroup()), {**raw, "vocab_size": rows}
    small, large = kind.load(source, site), kind.build(kind.config(raw), site)
    theirs = dict(small.named_params())
    for name, param in large.named_params():
        _fill(param, theirs[name])
    documents = Documents(raw, read_generation_config(source) or None, beside(Path(source)))
    save_model(large, directory, SerialGroup(), documents, save_dtype=dtype, overwrite=overwrite)
    return before.vocab_size, rows


def _fill(param: Param, small: Param) -> None:
    """What the smaller model has; new rows of a vocabulary are the mean of its own."""
    (part, *others) = param.placement.parts
    if part.name != VOCAB or others:
        param.data[...] = small.data
        return
    dim = param.placement.fused
    old = tuple(slice(0, size) for size in small.data.shape)
    new = tuple(slice(small.data.shape[i], None) if i == dim else each for i, each in enumerate(old))
    param.data[old] = small.data
    param.data[new] = small.data.mean(axis=dim, keepdims=True)
