"""The readers of mpitp: what of each is damaged, what is then run, and what must hold where it was accepted.

Where a damaged input is accepted, the result must be that of another program which reads the same file (the
safetensors, tokenizers and gguf libraries), or that of the whole input, where the damage meant nothing.
"""

from __future__ import annotations

import random

from tests.fuzz import models, runs, texts
from tests.fuzz.bases import FIELDS, GGUF_FILES
from tests.fuzz.case import ERRORS, Case, Reader, tokens
from tests.fuzz.mutations import damage_words

GENERATE = "generate --model m --prompt The_cat --max-new-tokens 6 --json"
MODELS = tuple(f"model-{kind}" for kind in FIELDS)

COMMAND_LINES = [
    "generate --model m --prompt The_cat --max-new-tokens 4 --json --temperature 0.7 --top-k 5 --top-p 0.9 --seed 7",
    "generate --model m --prompts prompts.txt --max-new-tokens 4 --no-echo --dtype float64",
    "generate --model m --prompt a --stream --invariant --invariant-blocks 4 --tokens-per-second --max-new-tokens 3",
    "data prepare t.txt --tokenizer bytes --out out --valid-fraction 0.1",
    "data prepare t.txt t.txt --tokenizer m --out out --plain-specials",
    "data show d --tokens 8 --check",
    "train run.toml --set train.steps=1 --set optim.lr=1e-2 --set train.run_dir=new",
    "train run.toml --set train.steps=3 --resume auto",
    "convert model.gguf out --dtype bfloat16",
    "verify --model m --batch 1 --seq 4 --seed 1 --failures-only",
    "verify --config run.toml --set train.steps=1 --dtype float64 --tolerance 1e-9 --json",
    "trace t.json --json",
    "step --list",
]


def damage_command_line(rng: random.Random, case: Case) -> None:
    words = [word.replace("The_cat", "The cat") for word in rng.choice(COMMAND_LINES).split()]
    case.commands = [damage_words(rng, words)]
    case.told = " ".join(f"{word!a:.60}" for word in case.commands[0])


def _nothing(case: Case) -> list[str]:
    return []


TRAIN = "train run.toml --set train.steps=1 --set train.run_dir=r"
READERS = {
    reader.name: reader
    for reader in (
        Reader(
            "run-file",
            ("untrained",),
            (TRAIN,),
            runs.damage_run_file,
            runs.check_run_file,
            runs.losses,
            asks_for_sizes=True,
        ),
        Reader("config", MODELS, (GENERATE,), models.damage_config, models.check_config, tokens),
        Reader("safetensors", MODELS, (GENERATE,), models.damage_weights, models.check_weights),
        Reader("index", ("sharded",), (GENERATE,), models.damage_shards, models.check_shards, tokens),
        Reader(
            "tokenizer",
            ("tokenizer-bytes", "tokenizer-words", "tokenizer-pieces"),
            ("data prepare t.txt --tokenizer tok --out out", "data show out --check"),
            texts.damage_tokenizer,
            texts.check_tokenizer,
        ),
        Reader(
            "model-tokenizer", ("model-llama",), (GENERATE,), texts.damage_model_tokenizer, texts.check_same_ids, tokens
        ),
        Reader(
            "text", ("texts",), ("data prepare t.txt --tokenizer bytes --out out",), texts.damage_text, texts.check_text
        ),
        Reader(
            "prompts",
            ("model-llama",),
            ("generate --model m --prompts prompts.txt --max-new-tokens 2 --json",),
            texts.damage_prompts,
            texts.check_prompts,
        ),
        Reader(
            "gguf",
            tuple(f"gguf-{name}" for name in GGUF_FILES),
            ("convert model.gguf out", "generate --model out --prompt hello --max-new-tokens 2"),
            models.damage_gguf,
            models.check_gguf,
        ),
        Reader("token-file", ("untrained",), (TRAIN,), runs.damage_data, runs.check_losses, runs.losses),
        Reader(
            "checkpoint",
            ("llama",),
            ("train run.toml --set train.steps=3 --resume auto",),
            runs.damage_checkpoint,
            runs.check_resumed,
            runs.final_model,
        ),
        Reader("options", ("everything",), (), damage_command_line, _nothing, codes=(*ERRORS, 6), asks_for_sizes=True),
    )
}
