#!/usr/bin/env python3
"""Save what PyTorch and transformers compute from a model directory, for `mpitp verify --against-reference OUT.npz`.

    python -m venv .venv-reference
    .venv-reference/bin/pip install torch==2.13.0 transformers
    .venv-reference/bin/python scripts/save_reference.py models/smollm2 reference.npz

The batch is random tokens; logits, mean loss and every gradient are computed in float64 (transformers itself computes
RoPE tables, norms and softmax in float32: differences of 1e-6 are its own).
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="DIR", help="a Hugging Face directory")
    parser.add_argument("out", metavar="OUT.NPZ")
    parser.add_argument("--batch", type=int, default=2, help="sequences; default 2")
    parser.add_argument("--seq", type=int, default=16, help="tokens a sequence; default 16")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float64, attn_implementation="eager").eval()
    vocab = model.config.vocab_size
    ids = torch.from_numpy(np.random.default_rng(args.seed).integers(0, vocab, (args.batch, args.seq + 1)))
    tokens, targets = ids[:, :-1], ids[:, 1:]
    logits = model(tokens, use_cache=False).logits.reshape(-1, vocab)
    loss = functional.cross_entropy(logits, targets.reshape(-1))
    loss.backward()
    grads = {f"grad/{name}": p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    arrays = {"tokens": tokens.numpy(), "targets": targets.numpy(), "logits": logits.detach().numpy()}
    np.savez(args.out, **arrays, loss=loss.detach().numpy(), **grads)
    print(f"{args.out}: loss {loss.item():.9f}, {len(grads)} gradients")


if __name__ == "__main__":
    main()
