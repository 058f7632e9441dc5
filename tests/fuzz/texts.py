"""Tokenizers, texts and prompts: damaged, and what must hold where they are accepted."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import tokenizers

from tests.fuzz.bases import TEXT
from tests.fuzz.case import Case, json_of, rewrite, tokens
from tests.fuzz.mutations import damage_bytes


def damage_tokenizer(rng: random.Random, case: Case) -> None:
    names = sorted(path.name for path in (case.folder / "tok").iterdir())
    case.told = rewrite(case.folder / "tok" / rng.choice([*names, "tokenizer.json"]), rng, 0.85)


def check_tokenizer(case: Case) -> list[str]:
    try:
        expected = _library(case.folder / "tok").encode(TEXT, add_special_tokens=False).ids
    except BaseException as error:  # its panics are no Exceptions
        return [f"accepted what the tokenizers library refuses: {error}"]
    manifest = json_of(case.folder / "out" / "manifest.json")
    found = np.fromfile(case.folder / "out" / "tokens.bin", {"uint16": "<u2", "uint32": "<u4"}[manifest["dtype"]])
    tail = found[len(expected) :]
    return [] if found[: len(expected)].tolist() == expected and len(tail) <= 1 else ["other tokens than the library's"]


def damage_model_tokenizer(rng: random.Random, case: Case) -> None:
    name = rng.choice(["tokenizer.json", "tokenizer.json", "tokenizer_config.json"])
    case.told = rewrite(case.folder / "m" / name, rng)


def check_same_ids(case: Case) -> list[str]:
    """The same ids of the prompt, by the library, must give the same ids of the continuation."""
    prompts = [
        _library(folder / "m").encode("The cat", add_special_tokens=False).ids for folder in (case.folder, case.base)
    ]
    configs = [json_of(folder / "m" / "tokenizer_config.json") for folder in (case.folder, case.base)]
    if prompts[0] != prompts[1] or any(
        configs[0].get(key) != configs[1].get(key) for key in ("eos_token", "add_bos_token")
    ):
        return []
    if json_of(case.folder / "m" / "tokenizer.json").get("post_processor") is not None:
        return []
    return [] if tokens(case) == case.whole else ["the same prompt gave other tokens"]


def _library(folder: Path) -> tokenizers.Tokenizer:
    """The library's own reading of a tokenizer, without the settings of its training."""
    library = tokenizers.Tokenizer.from_str((folder / "tokenizer.json").read_text("utf-8-sig"))
    library.no_truncation()
    library.no_padding()
    if isinstance(library.model, tokenizers.models.BPE):
        library.model.dropout = None
    return library


def damage_text(rng: random.Random, case: Case) -> None:
    path = case.folder / "t.txt"
    path.write_bytes(damage_bytes(rng, path.read_bytes()))


def check_text(case: Case) -> list[str]:
    expected = [*(case.folder / "t.txt").read_bytes().removeprefix(b"\xef\xbb\xbf"), 256]
    found = np.fromfile(case.folder / "out" / "tokens.bin", "<u2").tolist()
    return [] if found == expected else ["other tokens than the text's bytes"]


def damage_prompts(rng: random.Random, case: Case) -> None:
    path = case.folder / "prompts.txt"
    path.write_bytes(damage_bytes(rng, path.read_bytes()))


def check_prompts(case: Case) -> list[str]:
    lines = (case.folder / "prompts.txt").read_bytes().decode("utf-8-sig").removesuffix("\n").split("\n")
    found = [json.loads(line)["prompt"] for line in case.outputs[-1].splitlines()]
    return [] if found == [line.removesuffix("\r") for line in lines] else ["other prompts than the file's lines"]
