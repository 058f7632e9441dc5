#!/usr/bin/env python3
"""Random encoders, vision transformers and encoder-decoders, computed by mpitp and by transformers: logits, loss, every
gradient; greedy texts where there is a decoder. `differential.py` does the same for decoders, in the same environment.

    PYTHONPATH=. .venv-golden/bin/python scripts/differential_others.py --cases 240
    PYTHONPATH=. .venv-golden/bin/python scripts/differential_others.py --store      # the stored cases of tests/parity

The reference takes each text by itself, so that nothing is padded.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from differential import GPT_ACTIVATIONS, Case, Fields, run
from golden import double_precision
from golden_encoder_decoders import as_transformers_4_has_it
from golden_vision import names_in_file
from torch.nn import functional
from transformers import CONFIG_MAPPING, PreTrainedModel

from mpitp.models import Batch
from mpitp.models.encoder_config import CLASSIFICATION, MASKED, TOKENS, EncoderConfig
from mpitp.models.encoders import ENCODER_TYPES
from mpitp.models.vision_config import CLASSES, VisionConfig
from tests.parity.differential import Arrays, digest, weight_of
from tests.parity.differential_others import (
    CASES,
    LOGITS_BIAS,
    NEW_TOKENS,
    SHOWN,
    TYPES,
    AnyConfig,
    batch_of,
    computed,
    config_of,
    padded,
    pixels_of,
)

STORED_A_TYPE = 3
PAIR_CLASSES = {"t5": "T5ForConditionalGeneration", "bart": "BartForConditionalGeneration", "marian": "MarianMTModel"}


def labels(pick: random.Random) -> Fields:
    """Names of a few classes."""
    names = {i: f"class {i}" for i in range(pick.randint(2, 5))}
    return {"id2label": names, "label2id": {name: i for i, name in names.items()}}


def bert(pick: random.Random, *, offset: int = 0) -> Fields:
    """Sizes, ragged in every way that is allowed; `offset`: what RoBERTa's position table has more."""
    heads, pad = pick.randint(1, 5), pick.randint(0, 3)
    return {
        **{"vocab_size": pick.randint(7, 23), "hidden_size": heads * pick.randint(2, 5), "num_attention_heads": heads},
        **{"num_hidden_layers": pick.randint(1, 3), "intermediate_size": pick.randint(3, 19), "pad_token_id": pad},
        "max_position_embeddings": pick.choice([11, 16, 64]) + (pad + 1 if offset else 0),
        "type_vocab_size": pick.randint(1, 3),
        "hidden_act": pick.choice(GPT_ACTIVATIONS),
        "layer_norm_eps": pick.choice([1e-12, 1e-5, 1e-2]),
        "classifier_dropout": pick.choice([None, 0.3]),
        **labels(pick),
    }


def distilbert(pick: random.Random) -> Fields:
    words = {"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
    words |= {"intermediate_size": "hidden_dim", "hidden_act": "activation"}
    fields = bert(pick)
    for key in ("type_vocab_size", "layer_norm_eps", "classifier_dropout"):
        del fields[key]
    return {words.get(key, key): value for key, value in fields.items()}


def vit(pick: random.Random) -> Fields:
    heads, patch = pick.randint(1, 5), pick.randint(1, 5)
    return {
        **{"hidden_size": heads * pick.randint(2, 5), "num_attention_heads": heads},
        **{"num_hidden_layers": pick.randint(1, 3), "intermediate_size": pick.randint(3, 19)},
        **{"patch_size": patch, "image_size": patch * pick.randint(1, 4) + pick.randrange(patch)},
        **{"num_channels": pick.randint(1, 3), "qkv_bias": pick.random() < 0.7},
        "hidden_act": pick.choice(GPT_ACTIVATIONS),
        "layer_norm_eps": pick.choice([1e-12, 1e-6, 1e-2]),
        **labels(pick),
    }


def dinov2(pick: random.Random) -> Fields:
    fields = {key: value for key, value in vit(pick).items() if key != "intermediate_size"}
    return fields | {"mlp_ratio": pick.randint(1, 4), "layerscale_value": pick.choice([0.1, 1.0])}


def t5(pick: random.Random) -> Fields:
    gate, heads = pick.choice(["", "gated-"]), pick.randint(1, 5)
    buckets = pick.choice([4, 8, 10, 32])
    return {
        **{"vocab_size": pick.randint(7, 23), "d_model": pick.randint(2, 14), "d_kv": pick.randint(1, 6)},
        **{"num_heads": heads, "d_ff": pick.randint(3, 19), "feed_forward_proj": gate + pick.choice(GPT_ACTIVATIONS)},
        **{"num_layers": pick.randint(1, 3), "num_decoder_layers": pick.choice([None, 1, 2, 3])},
        **{"relative_attention_num_buckets": buckets, "relative_attention_max_distance": buckets + pick.randint(0, 9)},
        **{"layer_norm_epsilon": pick.choice([1e-6, 1e-2]), "tie_word_embeddings": pick.random() < 0.5},
        **{"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": pick.choice([0, 0, 4])},
    }


def bart(pick: random.Random) -> Fields:
    width = pick.choice([2, 3, 4])
    counts = pick.choice([(1, 2), (2, 1), (3, 3), (6, 2), (4, 6)])  # of heads; both divide 12
    return {
        **{"vocab_size": pick.randint(9, 23), "d_model": 12 * width, "scale_embedding": pick.random() < 0.5},
        **{"encoder_attention_heads": counts[0], "decoder_attention_heads": counts[1]},
        **{f"{side}_layers": pick.randint(1, 3) for side in ("encoder", "decoder")},
        **{f"{side}_ffn_dim": pick.randint(3, 19) for side in ("encoder", "decoder")},
        "max_position_embeddings": pick.choice([11, 16, 64]),
        "activation_function": pick.choice(GPT_ACTIVATIONS),
    }


def marian(pick: random.Random) -> Fields:
    fields = bart(pick)
    pad = fields["vocab_size"] - 1
    return fields | {"pad_token_id": pad, "decoder_start_token_id": pad, "eos_token_id": 0, "forced_eos_token_id": 0}


MAKERS = {
    **{"bert": bert, "roberta": lambda pick: bert(pick, offset=1), "distilbert": distilbert},
    **{"vit": vit, "dinov2": dinov2, "t5": t5, "bart": bart, "marian": marian},
}


def class_of(kind: str, pick: random.Random) -> str:
    """The class of a random head, or the one that the type has."""
    if kind in ENCODER_TYPES:
        return ENCODER_TYPES[kind].classes[pick.choice([MASKED, CLASSIFICATION, TOKENS])]
    return CLASSES[kind][CLASSIFICATION] if kind in CLASSES else PAIR_CLASSES[kind]


def make_model(name: str, kind: str, fields: Fields, directory: Path) -> tuple[PreTrainedModel, dict[str, str]]:
    """A model in float64 whose weights follow from the tensors' names, saved; and these names."""
    config = CONFIG_MAPPING[kind](**fields)
    config._attn_implementation = "eager"
    model = getattr(transformers, name)(config).eval()
    if not getattr(config, "scale_decoder_outputs", True):
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    for param in trained.values():
        param.data = torch.randn(param.shape)
    model.save_pretrained(directory)
    names = names_in_file(model, directory) if kind in CLASSES else {name: name for name in trained}
    model = model.double()
    for own, param in trained.items():
        param.data = torch.from_numpy(np.array(weight_of(names[own], tuple(param.shape))))
    if hasattr(model, LOGITS_BIAS):
        model.final_logits_bias.copy_(torch.from_numpy(weight_of(LOGITS_BIAS, model.final_logits_bias.shape)))
    model.save_pretrained(directory)
    if not getattr(config, "scale_decoder_outputs", True):
        as_transformers_4_has_it(directory)
    return model, {own: stored for own, stored in names.items() if not own.endswith("mask_token")}


def logits_of(model: PreTrainedModel, config: AnyConfig, batch: Batch, seed: int) -> torch.Tensor:
    """Logits of all texts or images [n, classes], one text at a time."""
    if isinstance(config, VisionConfig):
        other = {"interpolate_pos_encoding": True} if config.model_type == "vit" else {}
        return model(pixel_values=torch.from_numpy(pixels_of(config, seed)), **other).logits
    found = []
    types = None if batch.types is None else split(batch.types, batch)
    for number, ids in enumerate(split(batch.tokens, batch)):
        if isinstance(config, EncoderConfig):
            inputs = {"input_ids": ids} | ({"token_type_ids": types[number]} if types else {})
        else:
            source = split(batch.source.tokens, batch.source)[number]
            inputs = {"input_ids": source, "decoder_input_ids": ids, "use_cache": False}
        found.append(model(**inputs).logits.flatten(0, -2))
    return torch.cat(found)


def split(values: np.ndarray, batch: Batch) -> list[torch.Tensor]:
    """What each text has of them, [1, length]."""
    places = np.cumsum([run.length for run in batch.rows.runs])[:-1]
    return [torch.from_numpy(np.array(one))[None] for one in np.split(values, places)]


@torch.no_grad()
def greedy_texts(model: PreTrainedModel, batch: Batch) -> np.ndarray:
    """As `computed` has them. Without a cache: T5's fails where the decoder has more blocks than the encoder."""
    how = {"do_sample": False, "num_beams": 1, "max_new_tokens": NEW_TOKENS, "use_cache": False}
    texts, ends = [], model.generation_config.eos_token_id
    for ids in split(batch.source.tokens, batch.source):
        made = model.generate(input_ids=ids, **how)[0, 1:].tolist()
        texts.append(made[: made.index(ends)] if ends in made else made)
    return padded(texts)


def reference(model: PreTrainedModel, names: dict[str, str], config: AnyConfig, seed: int) -> Arrays:
    """What transformers makes of the same batch, in float64."""
    batch = batch_of(config, seed)
    with double_precision():
        logits = logits_of(model, config, batch, seed)
        loss = functional.cross_entropy(logits, torch.from_numpy(batch.targets))
        loss.backward()
    params = dict(model.named_parameters())
    arrays = {"logits": logits.detach().numpy()[-SHOWN:], "loss": loss.detach().numpy()}
    arrays |= digest({stored: params[own].grad.numpy() for own, stored in names.items()})
    return arrays | ({} if batch.source is None else {"texts": greedy_texts(model, batch)})


def make_case(number: int, kind: str, pick: random.Random, directory: Path) -> Case:
    """One random case: what both sides need to know of it, and how each computes it."""
    fields: dict[str, Any] = MAKERS[kind](pick)
    size = pick.randint(fields["patch_size"], 5 * fields["patch_size"]) if "patch_size" in fields else 0
    model, names = make_model(class_of(kind, pick), kind, fields, directory)
    params, path = dict(model.named_parameters()), directory / "generation_config.json"
    shapes = {stored: list(params[own].shape) for own, stored in names.items()}
    if hasattr(model, LOGITS_BIAS):
        shapes[LOGITS_BIAS] = list(model.final_logits_bias.shape)
    facts = {
        "config": json.loads((directory / "config.json").read_text()),
        "generation": json.loads(path.read_text()) if path.exists() else {},
        **{"ranks": pick.choice([1, 2, 3]), "seed": number, "shapes": shapes, "image_size": size},
    }
    return Case(
        facts,
        lambda: reference(model, names, config_of(directory, size), number),
        lambda group: computed(group, directory, number, shapes, size),
    )


def main() -> int:
    assert set(MAKERS) == set(TYPES), "a type without random configs"
    return run(__doc__, list(MAKERS), make_case, CASES, STORED_A_TYPE)


if __name__ == "__main__":
    sys.exit(main())
