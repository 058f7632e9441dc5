#!/usr/bin/env python3
"""Make the golden files in tests/parity/golden_vision from the reference implementation (PyTorch and transformers).

    .venv-golden/bin/python scripts/golden_vision.py          (the environment of scripts/golden.py)

Each case is a tiny vision transformer with random weights, saved by transformers itself, and what the reference
computes from them in float64 for three images: logits, loss, the gradient of every parameter and ten training losses.
In `dinov2-other-size` the images are larger than those of the position table.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch
from golden import double_precision
from golden_encoders import LABELS, random_model, train
from safetensors.torch import load_file
from torch.nn import functional
from transformers import Dinov2Config, PreTrainedConfig, PreTrainedModel, ViTConfig

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "parity" / "golden_vision"
COMMON = {
    "hidden_size": 15,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "image_size": 13,
    "patch_size": 4,
    "num_channels": 2,
    "id2label": LABELS,
    "label2id": {name: i for i, name in LABELS.items()},
}
CASES: dict[str, tuple[str, PreTrainedConfig, int]] = {
    "vit": ("ViTForImageClassification", ViTConfig(**COMMON, intermediate_size=19), 13),
    "dinov2-other-size": ("Dinov2ForImageClassification", Dinov2Config(**COMMON, mlp_ratio=2), 21),
}


def names_in_file(model: PreTrainedModel, directory: Path) -> dict[str, str]:
    """What each parameter is called in the saved file, where transformers keeps older names than in memory."""
    stored = load_file(directory / "model.safetensors")
    found = {}
    for name, param in model.named_parameters():
        (found[name],) = [each for each, x in stored.items() if x.shape == param.shape and torch.equal(x, param.data)]
    return found


def make_case(case: str, name: str, config: PreTrainedConfig, size: int, seed: int) -> int:
    """Write one case's directory; return its size in bytes."""
    directory = GOLDEN / case
    shutil.rmtree(directory, ignore_errors=True)
    model = random_model(name, config, seed)
    model.save_pretrained(directory)
    stored_names = names_in_file(model, directory)
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn((3, config.num_channels, size, size), generator=generator)
    arrays = {"pixels": pixels.numpy(), "targets": np.array([2, 0, 1])}
    batch = {"pixel_values": pixels.double(), "targets": torch.tensor([2, 0, 1])}
    with double_precision():
        model = model.double()
        logits = model(pixel_values=batch["pixel_values"]).logits
        loss = functional.cross_entropy(logits, batch["targets"])
        loss.backward()
        arrays |= {"logits": logits.detach().numpy(), "loss": loss.detach().numpy()}
        for param_name, param in model.named_parameters():
            if param.grad is not None:
                arrays[f"grad/{stored_names[param_name]}"] = param.grad.numpy().copy()
        arrays["training_losses"] = np.array(train(model, batch))
    np.savez(directory / "golden.npz", **arrays)
    return sum(file.stat().st_size for file in directory.iterdir())


def main() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for seed, (case, (name, config, size)) in enumerate(CASES.items()):
        print(f"{case}: {make_case(case, name, config, size, seed) / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
