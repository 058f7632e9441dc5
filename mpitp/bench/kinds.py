"""`mpitp bench types`: the training step of each type of model against the time of its own matrix products.

All types have the same sizes and no dropout, so that what differs is what a type has besides: norms, activations, caps,
biases. One rank; a type's step and its products take turns, and the next type begins when they are done. Mixtures of
experts have a benchmark of their own (`mpitp bench experts`).
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from mpitp.backend.accelerator import accelerator_in_use
from mpitp.bench.machine import machine_facts
from mpitp.bench.products import AnyModel, attention_products, linear_products, patch_products, run_products
from mpitp.bench.random_model import draw_weights, random_model
from mpitp.bench.timing import CLOCKS, clocked, take_turns
from mpitp.bench.train import FLOOR, num_params
from mpitp.comm.group import Group
from mpitp.errors import UsageError
from mpitp.layers.rows import Rows
from mpitp.layers.site import Site, make_site
from mpitp.models.batch import Batch
from mpitp.models.config import file_key
from mpitp.models.encoder_config import CLASSIFICATION
from mpitp.models.encoder_decoders import (
    ENCODER_DECODER_TYPES,
    build_encoder_decoder,
    encoder_decoder_config_from_hf,
)
from mpitp.models.encoders import ENCODER_TYPES, build_encoder, encoder_config_from_hf
from mpitp.models.known_keys import FILE_KEYS
from mpitp.models.registry import MODEL_TYPES, config_from_hf
from mpitp.models.vision import Vision, build_vision
from mpitp.models.vision_config import CLASSES, vision_config_from_hf
from mpitp.optim.adamw import AdamW, AdamWSettings
from mpitp.train.step import TrainStep

STEP = "step"
MIXTURES = ("mixtral", "qwen2_moe")
DECODERS = tuple(name for name in MODEL_TYPES if name not in MIXTURES)
VISION_TYPES = tuple(CLASSES)
TYPES = (*DECODERS, *ENCODER_TYPES, *VISION_TYPES, *ENCODER_DECODER_TYPES)
PATCH, CHANNELS, LABELS = 16, 3, 10  # of images: as many patches as data has tokens, or a little fewer
_FACTS = ("hidden_size", "num_layers", "heads", "kv_heads", "ffn_hidden", "vocab_size", "max_positions")
_DISTILBERT = {"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
_DISTILBERT |= {"intermediate_size": "hidden_dim"}


def measure(args: argparse.Namespace, group: Group) -> dict[str, Any]:
    """All numbers of the benchmark."""
    if group.size > 1:
        raise UsageError("bench types measures one rank; mpitp bench train takes several")
    names = args.only.split(",") if args.only else TYPES
    if unknown := [name for name in names if name not in TYPES]:
        raise UsageError(f"--only {unknown[0]!r:.60}: no such type; there are {', '.join(TYPES)}")
    return {
        "machine": machine_facts(group),
        "accelerator": accelerator_in_use(),
        "sizes": {name: getattr(args, name) for name in ("layers", "hidden", "heads", "vocab", "batch", "seq")},
        "clock": args.clock,
        "rounds": args.rounds,
        "types": {name: _of_type(name, args, group) for name in names},
    }


def _of_type(name: str, args: argparse.Namespace, group: Group) -> dict[str, Any]:
    """Least times, and how often the products the step takes."""
    model = model_of(name, args, make_site(group, dtype=args.dtype))
    batch = images_of(model, args) if isinstance(model, Vision) else batch_of(args)
    batch = pairs_of(args) if name in ENCODER_DECODER_TYPES else batch
    step = TrainStep(model, AdamW(model.named_params(), AdamWSettings()), clip_norm=1.0)
    rows = batch.rows
    floor = linear_products(model, rows.num_tokens), attention_products(model, [run.length for run in rows.runs])
    if isinstance(model, Vision):
        floor[0].extend(patch_products(model, len(batch.tokens)))
    works: dict[str, Callable[[], Any]] = {STEP: lambda: step([batch], lr=1e-5)}
    works |= {part: partial(run_products, own) for part, own in zip(FLOOR, floor, strict=True)}
    tasks = {part: clocked(work, CLOCKS[args.clock]) for part, work in works.items()}
    samples = take_turns(tasks, args.rounds, group, f"bench types: {name}")
    least, median = samples.ratio(STEP, *FLOOR)
    return {
        "parameters": num_params(model),
        "step_least_seconds": samples.least(STEP),
        "floor_least_seconds": samples.least(*FLOOR),
        "step_to_floor": {"least": least, "median": median},
    }


def model_of(name: str, args: argparse.Namespace, site: Site) -> AnyModel:
    """A model of a type, of the sizes given; with a decoder beside an encoder as many layers of each."""
    if name in ENCODER_DECODER_TYPES:
        pair = build_encoder_decoder(encoder_decoder_config_from_hf(pair_fields(name, args)), site)
        draw_weights(pair.named_params())
        return pair
    if name in VISION_TYPES:
        vision = build_vision(vision_config_from_hf(vision_fields(name, args)), site)
        draw_weights(vision.named_params())
        return vision
    if name not in ENCODER_TYPES:
        return random_model(config_from_hf(decoder_fields(name, args)), site)
    model = build_encoder(encoder_config_from_hf(encoder_fields(name, args)), site)
    draw_weights(model.named_params())
    return model


def decoder_fields(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """The config.json of a decoder; what its type calls the same is named once."""
    ffn = args.ffn or 4 * args.hidden
    sizes = (args.hidden, args.layers, args.heads, args.heads, ffn, args.vocab, args.seq)
    fields: dict[str, Any] = {"model_type": name, "head_dim": args.hidden // args.heads}
    for fact, size in zip(_FACTS, sizes, strict=True):
        fields.setdefault(file_key(name, fact), size)
    rates = {key for fact, key in FILE_KEYS[name].items() if fact.startswith("dropouts.") and key}
    return fields | dict.fromkeys(sorted(rates), 0.0) | {"bos_token_id": None, "eos_token_id": None}


def encoder_fields(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """That of an encoder with the head of masked language models."""
    fields = {
        "hidden_size": args.hidden,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "intermediate_size": args.ffn or 4 * args.hidden,
    }
    if name == "distilbert":
        fields = {_DISTILBERT[key]: size for key, size in fields.items()}
    rates = ("dropout", "attention_dropout") if name == "distilbert" else _BERT_RATES
    return {
        **{"model_type": name, "architectures": [ENCODER_TYPES[name].classes["masked"]], "vocab_size": args.vocab},
        **{"max_position_embeddings": args.seq + 2},  # RoBERTa doesn't use the first two
        **fields,
        **dict.fromkeys(rates, 0.0),
    }


def pair_fields(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """That of an encoder with a decoder; T5's MLP has a gate, as v1.1's."""
    ffn = args.ffn or 4 * args.hidden
    ids = {"model_type": name, "vocab_size": args.vocab, "d_model": args.hidden, "eos_token_id": 1, "pad_token_id": 0}
    if name == "t5":
        sizes = {"d_kv": args.hidden // args.heads, "num_heads": args.heads, "d_ff": ffn, "num_layers": args.layers}
        return ids | sizes | {"dropout_rate": 0.0, "feed_forward_proj": "gated-gelu"}
    sides = ("encoder", "decoder")
    sizes = {f"{side}_layers": args.layers for side in sides} | {f"{side}_ffn_dim": ffn for side in sides}
    sizes |= {f"{side}_attention_heads": args.heads for side in sides} | {"max_position_embeddings": args.seq}
    rates = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
    return ids | sizes | rates | {"decoder_start_token_id": 0}


def vision_fields(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """That of a vision transformer that classifies square images of about as many patches as a sequence has tokens."""
    ffn, side = args.ffn or 4 * args.hidden, math.isqrt(args.seq) * PATCH
    inner = {"mlp_ratio": max(ffn // args.hidden, 1)} if name == "dinov2" else {"intermediate_size": ffn}
    return {
        **{"model_type": name, "architectures": [CLASSES[name][CLASSIFICATION]], "num_labels": LABELS},
        **{"hidden_size": args.hidden, "num_hidden_layers": args.layers, "num_attention_heads": args.heads},
        **{
            "image_size": side,
            "patch_size": PATCH,
            "num_channels": CHANNELS,
            **inner,
            **dict.fromkeys(_BERT_RATES, 0.0),
        },
    }


def images_of(model: Vision, args: argparse.Namespace) -> Batch:
    """Random pixels and a class for each image."""
    import numpy as np

    config, random = model.config, np.random.default_rng(1)
    patches = config.grid[0] * config.grid[1]
    pixels = random.standard_normal((args.batch * patches, config.channels * config.patch_size**2), np.float32)
    return Batch(pixels, Rows.of([1 + patches] * args.batch), random.integers(0, LABELS, args.batch))


_BERT_RATES = ("hidden_dropout_prob", "attention_probs_dropout_prob")


def batch_of(args: argparse.Namespace) -> Batch:
    """Random ids and a target for each."""
    import numpy as np

    ids = np.random.default_rng(1).integers(0, args.vocab, (args.batch, args.seq + 1))
    return Batch.of_rows(ids[:, :-1], ids[:, 1:])


def pairs_of(args: argparse.Namespace) -> Batch:
    """The same as targets, with as many random ids as sources."""
    import numpy as np

    ids = np.random.default_rng(2).integers(0, args.vocab, (args.batch, args.seq))
    return dataclasses.replace(batch_of(args), source=Batch.of_rows(ids))


def report(facts: dict[str, Any]) -> list[str]:
    """The lines to print, the dearest type first."""
    sizes = facts["sizes"]
    lines = [
        f"{sizes['layers']} layers x {sizes['hidden']} wide, {sizes['heads']} heads, vocabulary {sizes['vocab']}; "
        f"{sizes['batch']} x {sizes['seq']} tokens; passes: {facts['accelerator']}; {facts['rounds']} rounds, "
        f"{facts['clock']} time",
        "",
        f"{'type':14}{'step':>12}{'products':>12}{'ratio, least':>14}{'median of pairs':>17}",
    ]
    for name, own in sorted(facts["types"].items(), key=lambda item: -item[1]["step_to_floor"]["least"]):
        ratio = own["step_to_floor"]
        lines.append(
            f"{name:14}{own['step_least_seconds']:10.3f} s{own['floor_least_seconds']:10.3f} s"
            f"{ratio['least']:14.3f}{ratio['median']:17.3f}"
        )
    return lines
