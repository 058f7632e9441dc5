#!/usr/bin/env python3
"""Train a small vision transformer on scikit-learn's handwritten digits, on 1 and on 3 ranks: one accuracy.

    pip install scikit-learn                   (for its data set, load_digits: 1,797 images of 8 x 8, BSD)
    python scripts/train_digits.py             (a few minutes on one core)

1,437 images are trained on, 360 held out, chosen by a fixed permutation. Ends with code 1 where the accuracy on the
held-out images is below 0.95, or where 1 and 3 ranks differ: in the invariant mode they are equal to the last bit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

LEAST = 0.95
RUN = """
[model]
model_type = "vit"
hidden_size = 64
num_hidden_layers = 2
num_attention_heads = 4
intermediate_size = 128
image_size = 8
patch_size = 4
num_channels = 1
[task]
kind = "image"
[data]
train = "{folder}/train.npz"
valid = "{folder}/valid.npz"
[train]
steps = 500
global_batch_size = 32
micro_batch_size = 32
log_every = 100
invariant = true
run_dir = "{folder}/run{ranks}"
[optim]
lr = 3e-3
warmup_steps = 30
"""


def write_data(folder: Path) -> None:
    """train.npz and valid.npz: images of bytes, and their labels."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = np.round(digits.images * (255 / 16)).astype(np.uint8)
    order = np.random.default_rng(0).permutation(len(pixels))
    for name, chosen in (("train", order[360:]), ("valid", order[:360])):
        np.savez(folder / f"{name}.npz", images=pixels[chosen], labels=digits.target[chosen])


def accuracy(folder: Path, ranks: int) -> float:
    """Train on so many ranks; the held-out accuracy that the run reports."""
    (folder / f"run{ranks}.toml").write_text(RUN.format(folder=folder, ranks=ranks))
    words = ["launch", "-n", str(ranks), "--"] if ranks > 1 else []
    command = [sys.executable, "-m", "mpitp", *words, "train", str(folder / f"run{ranks}.toml")]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
    lines = (folder / f"run{ranks}" / "metrics.jsonl").read_text().splitlines()
    return float(json.loads(lines[-1])["valid_accuracy"])


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder)
        found = {ranks: accuracy(folder, ranks) for ranks in (1, 3)}
    print(", ".join(f"{ranks} rank{'s' * (ranks > 1)}: accuracy {value:.4f}" for ranks, value in found.items()))
    return 0 if min(found.values()) >= LEAST and found[1] == found[3] else 1


if __name__ == "__main__":
    sys.exit(main())
