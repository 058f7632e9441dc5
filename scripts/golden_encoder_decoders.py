#!/usr/bin/env python3
"""Make the golden files in tests/parity/golden_encoder_decoders from the reference implementation (PyTorch and
transformers).

    .venv-golden/bin/python scripts/golden_encoder_decoders.py      (the environment of scripts/golden.py)

Each case is a tiny model with random weights, saved by transformers itself, and what the reference computes from them
in float64 for three pairs of texts of unequal length, padded: the encoder's output and the logits of the tokens that
are there, loss, the gradient of every parameter, ten training losses; and what `generate` makes of the sources,
greedily and by several beam searches. Names of cases as arguments make these alone.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from golden import BETAS, CLIP_NORM, EPS, LR, STEPS, TORCH, TRANSFORMERS, WEIGHT_DECAY, double_precision
from torch.nn import functional
from transformers import BartConfig, MarianConfig, PreTrainedConfig, PreTrainedModel, T5Config
from transformers.models.t5.modeling_t5 import T5Attention

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "parity" / "golden_encoder_decoders"
SOURCE_LENGTHS, TARGET_LENGTHS = (9, 5, 14), (6, 11, 3)
NEW_TOKENS = 9
# beams, length penalty, when to stop early
SEARCHES: list[tuple[int, float, bool | str]] = [(3, 1.0, False), (2, 2.0, True), (4, 0.3, "never"), (3, -1.0, False)]
T5: dict[str, Any] = {
    "vocab_size": 29,
    "d_model": 13,
    "d_kv": 3,
    "d_ff": 11,
    "num_layers": 2,
    "num_heads": 5,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.0,
}
BART: dict[str, Any] = {
    "vocab_size": 31,
    "d_model": 12,
    "encoder_layers": 2,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 17,
    "decoder_ffn_dim": 13,
    "max_position_embeddings": 24,
    "dropout": 0.0,
}
CASES: dict[str, tuple[str, PreTrainedConfig]] = {
    "t5": ("T5ForConditionalGeneration", T5Config(**T5)),
    "t5-gated": (
        "T5ForConditionalGeneration",
        T5Config(**T5, num_decoder_layers=1, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    ),
    "bart": ("BartForConditionalGeneration", BartConfig(**BART, decoder_layers=1)),
    "marian": (
        "MarianMTModel",
        MarianConfig(
            **BART,
            decoder_layers=2,
            scale_embedding=True,
            activation_function="swish",
            pad_token_id=30,
            decoder_start_token_id=30,
        ),
    ),
}
# What generation_config.json says beside the ids: of BART's translators and summarizers, and of Marian's.
RULES: dict[str, dict[str, Any]] = {
    "bart": {"forced_bos_token_id": 7, "forced_eos_token_id": 2, "no_repeat_ngram_size": 2},
    "marian": {"bad_words_ids": [[30]], "forced_eos_token_id": 0},
}


def random_model(case: str, seed: int) -> PreTrainedModel:
    """A float32 model none of whose parameters has a special value; v1.1's head has a table of its own."""
    name, config = CASES[case]
    config._attn_implementation = "eager"
    model = getattr(transformers, name)(config)
    model.generation_config.update(**RULES.get(case, {}))
    if not getattr(config, "scale_decoder_outputs", True):
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    generator = torch.Generator().manual_seed(seed)
    for name, param in model.named_parameters():
        if "embed_positions" in name and not param.requires_grad:
            continue  # sines
        noise = torch.randn(param.shape, generator=generator)
        is_norm_weight = param.dim() == 1 and name.endswith("weight")
        scale = 0.1 if param.dim() == 1 else 1.0 if name.endswith(("shared.weight", "bias.weight")) else 0.3
        param.data = scale * noise + (1.0 if is_norm_weight else 0.0)
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.copy_(0.5 * torch.randn(model.final_logits_bias.shape, generator=generator))
    return model.eval()


def random_batch(config: PreTrainedConfig, seed: int) -> dict[str, torch.Tensor]:
    """Padded ids and mask of the sources, ids of the targets as the decoder takes them, and labels.

    No text has the padding's own id: the reference gives its row of the table no gradient.
    """
    generator = torch.Generator().manual_seed(seed)
    pad, start = config.pad_token_id, config.decoder_start_token_id
    free = torch.tensor([i for i in range(config.vocab_size) if i not in (pad, start)])
    texts = {}
    for name, lengths in (("source", SOURCE_LENGTHS), ("target", TARGET_LENGTHS)):
        mask = torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]
        ids = free[torch.randint(len(free), mask.shape, generator=generator)]
        texts[name] = torch.where(mask, ids, pad), mask
    (source, source_mask), (target, target_mask) = texts["source"], texts["target"]
    labels = torch.where(target_mask, target, -100)
    labels[1, 2] = -100
    return {
        "input_ids": source,
        "attention_mask": source_mask.long(),
        "decoder_input_ids": torch.cat([torch.full((len(target), 1), start), target[:, :-1]], dim=1),
        "labels": labels,
        "target_mask": target_mask,
    }


def logits_of(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> Any:
    """The model's outputs, without a loss of its own."""
    return model(**{name: batch[name] for name in ("input_ids", "attention_mask", "decoder_input_ids")})


def mean_loss(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cross entropy, averaged over the targets that aren't -100."""
    logits = logits_of(model, batch).logits
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def train(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> list[float]:
    """Ten AdamW steps on one batch: the loss before each step."""
    params = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = mean_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, CLIP_NORM)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@torch.no_grad()
def generated(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Token ids behind the start token, padded: greedy, and of each search."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    found = {}
    for beams, penalty, early in [(1, 1.0, False), *SEARCHES]:
        search = {} if beams == 1 else {"length_penalty": penalty, "early_stopping": early}
        ids = model.generate(**inputs, num_beams=beams, do_sample=False, max_new_tokens=NEW_TOKENS, **search)
        found[f"generated/{beams}/{penalty}/{early}"] = ids[:, 1:].numpy()
    return found


def golden_arrays(model: PreTrainedModel, seed: int) -> dict[str, np.ndarray]:
    """Everything the tests compare with, without the padding."""
    batch = random_batch(model.config, seed)
    source, target = batch["attention_mask"].bool().flatten(), batch["target_mask"].flatten()
    arrays = {
        "source_lengths": np.array(SOURCE_LENGTHS),
        "target_lengths": np.array(TARGET_LENGTHS),
        "source": batch["input_ids"].flatten()[source].numpy(),
        "target": batch["decoder_input_ids"].flatten()[target].numpy(),
        "labels": batch["labels"].flatten()[target].numpy(),
    }
    model = model.double()
    arrays |= generated(model, batch)
    with double_precision():
        outputs = logits_of(model, batch)
        arrays["memory"] = outputs.encoder_last_hidden_state.detach().flatten(0, 1)[source].numpy()
        arrays["logits"] = outputs.logits.detach().flatten(0, 1)[target].numpy()
        loss = mean_loss(model, batch)
        loss.backward()
        arrays["loss"] = loss.detach().numpy()
        for name, param in model.named_parameters():
            if param.requires_grad:
                arrays[f"grad/{name}"] = param.grad.numpy().copy()
        arrays["training_losses"] = np.array(train(model, batch))
    return arrays


def buckets() -> dict[str, np.ndarray]:
    """The reference's buckets of distances from -300 to 300, both ways and one way, T5's own number and another."""
    distances = torch.arange(-300, 301)
    return {
        f"{both_ways}/{count}/{furthest}": T5Attention._relative_position_bucket(
            distances, both_ways, count, furthest
        ).numpy()
        for both_ways in (True, False)
        for count, furthest in ((32, 128), (8, 12), (15, 40))
    }


def as_transformers_4_has_it(directory: Path) -> None:
    """The config.json of v1.1 as real files have it: a head of its own, and nothing of scales."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["tie_word_embeddings"] = config.pop("scale_decoder_outputs")
    path.write_text(json.dumps(config, indent=2) + "\n")


def ends_are_seen(arrays: dict[str, np.ndarray], config: PreTrainedConfig) -> bool:
    """Whether some texts end by themselves before the most tokens, and not all, and searches differ."""
    found = [ids for name, ids in arrays.items() if name.startswith("generated/")]
    early = [config.eos_token_id in row[:-2] for ids in found for row in ids.tolist()]
    return 4 <= sum(early) <= len(early) - 3 and len({ids.tobytes() for ids in found}) == len(found)


def make_case(case: str) -> int:
    """Write one case's directory, with the first seed whose texts end in several ways; return its size in bytes."""
    directory, config = GOLDEN / case, CASES[case][1]
    for seed in range(1, 400):
        model = random_model(case, seed)
        arrays = generated(model.double(), random_batch(config, seed))
        if ends_are_seen(arrays, config):
            break
    else:
        raise SystemExit(f"{case}: no seed has texts that end in several ways")
    shutil.rmtree(directory, ignore_errors=True)
    model = random_model(case, seed)
    model.save_pretrained(directory)
    if not getattr(config, "scale_decoder_outputs", True):
        as_transformers_4_has_it(directory)
    np.savez_compressed(directory / "golden.npz", **golden_arrays(model, seed))
    print(f"{case}: seed {seed}")
    return sum(file.stat().st_size for file in directory.iterdir())


def main() -> None:
    found = torch.__version__.split("+")[0], transformers.__version__
    if found != (TORCH, TRANSFORMERS):
        raise SystemExit(f"needs torch {TORCH} and transformers {TRANSFORMERS}, found {found[0]} and {found[1]}")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    GOLDEN.mkdir(exist_ok=True)
    np.savez_compressed(GOLDEN / "buckets.npz", **buckets())
    for case in sys.argv[1:] or CASES:
        print(f"{case}: {make_case(case) / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
