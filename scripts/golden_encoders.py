#!/usr/bin/env python3
"""Make the golden files in tests/parity/golden_encoders from the reference implementation (PyTorch and transformers).

    .venv-golden/bin/python scripts/golden_encoders.py          (the environment of scripts/golden.py)

Each case is a tiny encoder with random weights, saved by transformers itself, and what the reference computes from them
in float64 for three texts of unequal length, padded: logits of the tokens that are there, loss, the gradient of every
parameter and ten training losses. The tests compute the same without padding.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch
import transformers
from golden import BETAS, CLIP_NORM, EPS, LR, STEPS, TORCH, TRANSFORMERS, WEIGHT_DECAY, double_precision
from torch.nn import functional
from transformers import BertConfig, DistilBertConfig, PreTrainedConfig, PreTrainedModel, RobertaConfig

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "parity" / "golden_encoders"
LENGTHS = (9, 5, 12)
LABELS = {0: "red", 1: "green", 2: "blue"}
BERT = {
    "vocab_size": 37,
    "hidden_size": 15,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "intermediate_size": 19,
    "max_position_embeddings": 16,
    "id2label": LABELS,
    "label2id": {name: i for i, name in LABELS.items()},
}
DISTIL = {
    "vocab_size": 31,
    "dim": 14,
    "n_layers": 2,
    "n_heads": 7,
    "hidden_dim": 19,
    "max_position_embeddings": 16,
    "id2label": LABELS,
    "label2id": {name: i for i, name in LABELS.items()},
}
CASES: dict[str, tuple[str, PreTrainedConfig]] = {
    "bert-masked": ("BertForMaskedLM", BertConfig(**BERT)),
    "bert-classification": ("BertForSequenceClassification", BertConfig(**BERT, hidden_act="gelu_new")),
    "bert-tokens": ("BertForTokenClassification", BertConfig(**BERT, type_vocab_size=3)),
    "roberta-masked": ("RobertaForMaskedLM", RobertaConfig(**BERT)),
    "roberta-classification": ("RobertaForSequenceClassification", RobertaConfig(**BERT, type_vocab_size=1)),
    "distilbert-masked": ("DistilBertForMaskedLM", DistilBertConfig(**DISTIL)),
    "distilbert-classification": ("DistilBertForSequenceClassification", DistilBertConfig(**DISTIL, activation="relu")),
}


def random_model(name: str, config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """A float32 model none of whose parameters has a special value."""
    config._attn_implementation = "eager"
    model = getattr(transformers, name)(config)
    generator = torch.Generator().manual_seed(seed)
    for name, param in model.named_parameters():
        noise = torch.randn(param.shape, generator=generator)
        is_norm_weight = param.dim() == 1 and name.endswith("weight")
        param.data = (0.25 if param.dim() > 1 else 0.1) * noise + (1.0 if is_norm_weight else 0.0)
    return model.eval()


def random_batch(case: str, config: PreTrainedConfig, seed: int) -> dict[str, torch.Tensor]:
    """Padded ids, types and mask [3, 12], and targets: of masked tokens, of texts, or of tokens.

    No text has the padding's own id (0 or 1): the reference gives its row of the table no gradient.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (len(LENGTHS), max(LENGTHS))
    mask = torch.arange(shape[1])[None, :] < torch.tensor(LENGTHS)[:, None]
    ids = torch.randint(2, config.vocab_size, shape, generator=generator)
    ids[1, 4] = config.vocab_size - 1
    batch = {"input_ids": torch.where(mask, ids, config.pad_token_id), "attention_mask": mask.long()}
    if getattr(config, "type_vocab_size", 0):
        batch["token_type_ids"] = torch.randint(config.type_vocab_size, shape, generator=generator) * mask
    if case.endswith("classification"):
        batch["targets"] = torch.tensor([2, 0, 1])
        return batch
    classes = config.vocab_size if case.endswith("masked") else len(LABELS)
    targets = torch.randint(classes, shape, generator=generator)
    targets[torch.rand(shape, generator=generator) < 0.4] = -100
    batch["targets"] = torch.where(mask, targets, -100)
    return batch


def mean_loss(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cross entropy, averaged over the targets that aren't -100."""
    inputs = {name: value for name, value in batch.items() if name != "targets"}
    logits = model(**inputs).logits
    return functional.cross_entropy(logits.flatten(0, -2), batch["targets"].flatten(), ignore_index=-100)


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


def golden_arrays(case: str, model: PreTrainedModel, seed: int) -> dict[str, np.ndarray]:
    """Everything the tests compare with, without the padding."""
    batch = random_batch(case, model.config, seed)
    there = batch["attention_mask"].bool().flatten()
    arrays = {"lengths": np.array(LENGTHS)}
    for name, value in batch.items():
        if name != "attention_mask":
            arrays[name] = (value if value.dim() == 1 else value.flatten()[there]).numpy()
    with double_precision():
        model = model.double()
        inputs = {name: value for name, value in batch.items() if name != "targets"}
        logits = model(**inputs).logits.detach()
        arrays["logits"] = (logits if logits.dim() == 2 else logits.flatten(0, 1)[there]).numpy()
        loss = mean_loss(model, batch)
        loss.backward()
        arrays["loss"] = loss.detach().numpy()
        for name, param in model.named_parameters():
            arrays[f"grad/{name}"] = param.grad.numpy().copy()
        arrays["training_losses"] = np.array(train(model, batch))
    return arrays


def make_case(case: str, name: str, config: PreTrainedConfig, seed: int) -> int:
    """Write one case's directory; return its size in bytes."""
    directory = GOLDEN / case
    shutil.rmtree(directory, ignore_errors=True)
    model = random_model(name, config, seed)
    model.save_pretrained(directory)
    np.savez(directory / "golden.npz", **golden_arrays(case, model, seed))
    return sum(file.stat().st_size for file in directory.iterdir())


def main() -> None:
    found = torch.__version__.split("+")[0], transformers.__version__
    if found != (TORCH, TRANSFORMERS):
        raise SystemExit(f"needs torch {TORCH} and transformers {TRANSFORMERS}, found {found[0]} and {found[1]}")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for seed, (case, (name, config)) in enumerate(CASES.items()):
        print(f"{case}: {make_case(case, name, config, seed) / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
