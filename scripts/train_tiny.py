#!/usr/bin/env python3
"""Train the small language model that travels in the stepper's page, and write it where the page finds it.

    python scripts/train_tiny.py [STEPS]           (2000 steps: some minutes on one core)

A Llama of 47,000 weights over the bytes of UTF-8: 2 blocks, 6 heads of 8 with 2 KV heads, 80 FFN columns, 257 ids, so
that 4 ranks have unlike shares of everything. Its text is the documentation that comes with Python, in one line. The
Hugging Face directory `mpitp/step/tiny` has its weights in float16, 95 kB; `mpitp generate` takes it too.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

from mpitp.checkpoint.hf import Documents, save_model
from mpitp.checkpoint.load import load_model
from mpitp.comm import SerialGroup
from mpitp.layers.site import make_site

TARGET = Path(__file__).resolve().parent.parent / "mpitp" / "step" / "tiny"
RUN = """
[model]
model_type = "llama"
hidden_size = 48
num_hidden_layers = 2
num_attention_heads = 6
num_key_value_heads = 2
head_dim = 8
intermediate_size = 80
max_position_embeddings = 64
rope_theta = 1000.0
rms_norm_eps = 1e-5
initializer_range = 0.08
tie_word_embeddings = true
[data]
train = "FOLDER/data/train"
valid = "FOLDER/data/valid"
seq_len = 64
[train]
steps = STEPS
global_batch_size = 32
micro_batch_size = 32
eval_every = 500
log_every = 500
run_dir = "FOLDER/run"
[optim]
lr = 8e-3
min_lr = 2e-4
warmup_steps = 50
[checkpoint]
every = 100000
"""


def text() -> str:
    """The documentation in words and single spaces; rows of signs are left out."""
    words = " ".join(topics[name] for name in sorted(topics)).split()
    return " ".join(word for word in words if any(letter.isalnum() for letter in word) or len(word) < 3)


def mpitp(*words: str) -> None:
    """A verb of this installation."""
    subprocess.run([sys.executable, "-m", "mpitp", *words], check=True)


def main(steps: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text(text(), encoding="utf-8")
        (folder / "run.toml").write_text(RUN.replace("FOLDER", name).replace("STEPS", str(steps)), encoding="utf-8")
        prepare = ("data", "prepare", str(folder / "text.txt"), "--tokenizer", "bytes", "--valid-fraction", "0.03")
        mpitp(*prepare, "--out", str(folder / "data"))
        mpitp("train", str(folder / "run.toml"))
        trained = folder / "run" / "model"
        model = load_model(trained, make_site(SerialGroup()))
        beside = {path.name: path.read_bytes() for path in sorted(trained.glob("tokenizer*.json"))}
        documents = Documents(json.loads((trained / "config.json").read_text(encoding="utf-8")), None, beside)
        save_model(model, TARGET, SerialGroup(), documents, save_dtype="float16", overwrite=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
