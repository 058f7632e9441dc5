"""A random encoder, vision transformer or encoder-decoder compared with transformers, as `differential.py` compares
decoders; `scripts/differential_others.py` has the other side.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mpitp.checkpoint.encoder import load_encoder, load_encoder_config
from mpitp.checkpoint.encoder_decoder import load_encoder_decoder, load_encoder_decoder_config
from mpitp.checkpoint.hf_directory import read_generation_config
from mpitp.checkpoint.vision import load_vision, load_vision_config
from mpitp.comm import Group
from mpitp.data.images import unfold
from mpitp.infer.beams import BeamSettings
from mpitp.infer.rules import read_rules
from mpitp.infer.translate import translate
from mpitp.layers.rows import Rows
from mpitp.layers.site import make_site
from mpitp.models import Batch
from mpitp.models.encoder import Encoder
from mpitp.models.encoder_config import CLASSIFICATION, EncoderConfig
from mpitp.models.encoder_decoder import EncoderDecoder
from mpitp.models.encoder_decoder_config import EncoderDecoderConfig
from mpitp.models.encoder_decoders import ENCODER_DECODER_TYPES
from mpitp.models.encoders import ENCODER_TYPES
from mpitp.models.vision import Vision
from mpitp.models.vision_config import CLASSES, VisionConfig
from mpitp.optim.grad_sync import sync_gradients
from tests.parity.differential import Arrays, digest, write_directory
from tests.parity.global_tensors import global_tensors

CASES = Path(__file__).parent / "differential_others.json"
TYPES = (*ENCODER_TYPES, *CLASSES, *ENCODER_DECODER_TYPES)
LENGTHS, TARGET_LENGTHS = (7, 3, 11), (4, 9, 2)
IMAGES, NEW_TOKENS, SHOWN = 2, 8, 8
LOGITS_BIAS = "final_logits_bias"  # BART's and Marian's; it isn't trained
AnyConfig = EncoderConfig | VisionConfig | EncoderDecoderConfig


def write_case(directory: Path, case: Mapping[str, Any]) -> None:
    """The Hugging Face directory of a stored case."""
    write_directory(directory, case["config"], case["shapes"])
    if case["generation"]:
        (directory / "generation_config.json").write_text(json.dumps(case["generation"]))


def config_of(directory: Path, image_size: int) -> AnyConfig:
    """What mpitp reads; of a vision transformer for images of another size, where `image_size` isn't 0."""
    kind = json.loads((directory / "config.json").read_text())["model_type"]
    if kind in ENCODER_TYPES:
        return load_encoder_config(directory)
    if kind in CLASSES:
        config = load_vision_config(directory)
        return config.for_size(image_size) if image_size else config
    return load_encoder_decoder_config(directory)


def batch_of(config: AnyConfig, seed: int) -> Batch:
    """Random texts, images, or pairs of texts, and their targets, one after the other."""
    rng = np.random.default_rng(seed)
    if isinstance(config, VisionConfig):
        pixels = pixels_of(config, seed)
        rows = Rows.of([1 + config.grid[0] * config.grid[1]] * IMAGES)
        return Batch(unfold(pixels, config.patch_size), rows, rng.integers(0, len(config.labels), IMAGES))
    if isinstance(config, EncoderConfig):
        batch = _texts(config, LENGTHS, rng)
        of_texts = config.head == CLASSIFICATION
        targets = rng.integers(0, config.num_classes, len(LENGTHS) if of_texts else sum(LENGTHS))
        if not of_texts:
            targets[rng.random(len(targets)) < 0.4] = -100
        types = rng.integers(0, config.num_types, sum(LENGTHS)) if config.num_types else None
        return replace(batch, targets=targets, types=types)
    source, labels = _texts(config, LENGTHS, rng), _texts(config, TARGET_LENGTHS, rng)
    texts = np.split(labels.tokens, np.cumsum(TARGET_LENGTHS)[:-1])
    shifted = np.concatenate([[config.start_id, *text[:-1]] for text in texts])
    targets = np.where(rng.random(len(shifted)) < 0.2, -100, labels.tokens)
    return Batch(shifted, labels.rows, targets, source=source)


def pixels_of(config: VisionConfig, seed: int) -> np.ndarray:
    """Random images [IMAGES, c, h, w]."""
    shape = (IMAGES, config.channels, config.image_size, config.image_size)
    return np.random.default_rng([seed, 1]).standard_normal(shape)


def _texts(config: EncoderConfig | EncoderDecoderConfig, lengths: tuple[int, ...], rng: np.random.Generator) -> Batch:
    """Without the padding's own id: the reference counts positions around it, and doesn't train its row."""
    pad = config.hf.get("pad_token_id")
    free = np.array([i for i in range(config.vocab_size) if i != pad])
    return Batch(rng.choice(free, sum(lengths)), Rows.of(lengths))


def computed(group: Group, directory: Path, seed: int, shapes: Mapping[str, list[int]], image_size: int = 0) -> Arrays:
    """What mpitp makes of a directory: logits, loss, each gradient's digest; greedy texts where there is a decoder."""
    config, site = config_of(directory, image_size), make_site(group, dtype="float64")
    if isinstance(config, EncoderConfig):
        model: Encoder | Vision | EncoderDecoder = load_encoder(directory, site)
    elif isinstance(config, VisionConfig):
        model = load_vision(directory, site, config=config)
    else:
        model = load_encoder_decoder(directory, site)
    batch = batch_of(config, seed)
    logits, _ = model.forward(batch)
    result = {"logits": model.gather_logits(logits)[-SHOWN:].copy()}
    loss, ctx = model.loss_forward(batch)
    model.loss_backward(ctx, 1 / batch.num_targets)
    for name, param in model.named_params():
        if name == "logits bias.bias":
            assert param.grad is None
            param.grad = np.zeros_like(param.data)
    sync_gradients((param for _, param in model.named_params()), model.site.mesh)
    like = {name: np.empty(shape) for name, shape in shapes.items()}
    result |= {"loss": np.array(loss / batch.num_targets)} | digest(global_tensors(model, group, "grad", like))
    if isinstance(model, EncoderDecoder):
        result["texts"] = _greedy_texts(model, directory, batch)
    return result


def _greedy_texts(model: EncoderDecoder, directory: Path, batch: Batch) -> np.ndarray:
    """Ids [texts, NEW_TOKENS], without what ends a text, -1 behind it."""
    assert batch.source is not None
    rules = replace(read_rules(model.config, read_generation_config(directory)), beams=BeamSettings())
    sources = [ids.tolist() for ids in np.split(batch.source.tokens, np.cumsum(LENGTHS)[:-1])]
    return padded([each.tokens for each in translate(model, sources, NEW_TOKENS, rules)])


def padded(texts: list[list[int]]) -> np.ndarray:
    """Texts of any lengths up to NEW_TOKENS as one array."""
    return np.array([[*text, *[-1] * (NEW_TOKENS - len(text))] for text in texts], np.float64)
