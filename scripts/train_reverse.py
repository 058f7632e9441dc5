#!/usr/bin/env python3
"""Train a small encoder-decoder to copy words and to turn them round, on 1 and on 3 ranks: one score.

    python scripts/train_reverse.py            (half a minute on one core)

All words of 2 to 4 letters out of six; "=fade" must become "fade", "<fade" "edaf". A tenth of the words, chosen by a
fixed permutation, is held out in both forms. Ends with code 1 where fewer than 0.95 of the held-out targets are right
from beginning to end, or where 1 and 3 ranks differ: in the invariant mode they are equal to the last bit.
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import numpy as np
from on_ranks import train_on_ranks

LEAST = 0.95
RUN = """
[model]
model_type = "bart"
d_model = 32
encoder_layers = 1
decoder_layers = 1
encoder_attention_heads = 4
decoder_attention_heads = 4
encoder_ffn_dim = 64
decoder_ffn_dim = 64
max_position_embeddings = 8
init_std = 0.2
dropout = { embd = 0.0, attn = 0.0, resid = 0.0 }
[task]
kind = "translation"
[data]
train = "FOLDER/train.tsv"
valid = "FOLDER/valid.tsv"
tokenizer = "bytes"
seq_len = 6
[train]
steps = 150
global_batch_size = 64
micro_batch_size = 64
log_every = 50
invariant = true
run_dir = "FOLDER/runRANKS"
[optim]
lr = 1e-2
warmup_steps = 20
"""


def write_data(folder: Path) -> None:
    """train.tsv and valid.tsv, which have no word in common."""
    words = ["".join(letters) for length in (2, 3, 4) for letters in product("abcdef", repeat=length)]
    order = np.random.default_rng(0).permutation(len(words))
    held_out = len(words) // 10
    for name, chosen in (("train", order[held_out:]), ("valid", order[:held_out])):
        lines = [f"={words[i]}\t{words[i]}\n<{words[i]}\t{words[i][::-1]}\n" for i in chosen]
        (folder / f"{name}.tsv").write_text("".join(lines))


if __name__ == "__main__":
    sys.exit(train_on_ranks(RUN, write_data, "exact", LEAST))
