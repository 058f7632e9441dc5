#!/usr/bin/env python3
"""Peak memory of training on one long sequence: attention must keep nothing that grows with its square.

    python scripts/long_sequence_memory.py                     16,384 tokens, 4 layers, 256 wide: within 2 GB
    python scripts/long_sequence_memory.py --tokens 2048 --limit-mib 500

Prints the peak of the process and what the scores of one layer alone would need; exit code 1 beyond the limit.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time

import numpy as np

from mpitp.comm import SerialGroup
from mpitp.layers.site import make_site
from mpitp.models import Batch, config_from_hf, new_model
from mpitp.optim.adamw import AdamW, AdamWSettings
from mpitp.train.step import TrainStep


def train(args: argparse.Namespace) -> float:
    """The loss of the last of the steps."""
    shape = {"hidden_size": args.hidden, "num_hidden_layers": args.layers, "num_attention_heads": args.heads}
    raw = {"model_type": "llama", "vocab_size": 256, "intermediate_size": 8 * args.hidden // 3, **shape}
    config = config_from_hf({**raw, "max_position_embeddings": args.tokens})
    model = new_model(config, make_site(SerialGroup()), seed=1)
    step = TrainStep(model, AdamW(model.named_params(), AdamWSettings()), clip_norm=1.0)
    ids = np.random.default_rng(1).integers(0, 256, (1, args.tokens + 1))
    return [step([Batch.of_rows(ids[:, :-1], ids[:, 1:])], 1e-3).loss for _ in range(args.steps)][-1]


def main() -> int:
    """Train and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"tokens": 16384, "layers": 4, "hidden": 256, "heads": 4, "steps": 1, "limit-mib": 1907}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    args = parser.parse_args()
    before, started = peak_mib(), time.perf_counter()
    loss = train(args)
    peak, scores = peak_mib(), args.heads * args.tokens**2 * 4 / 2**20
    print(f"{args.tokens} tokens, {args.layers} layers, {args.hidden} wide: loss {loss:.4f}")
    print(f"peak {peak:.0f} MiB ({before:.0f} before the model); one layer's scores would be {scores:.0f} MiB")
    verdict = "kept" if peak <= args.limit_mib else "BROKEN"
    print(f"{time.perf_counter() - started:.1f} s; limit {args.limit_mib} MiB: {verdict}")
    return int(peak > args.limit_mib)


def peak_mib() -> float:
    """Of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    sys.exit(main())
