"""Model directories and GGUF files: damaged, and what must hold where they are accepted."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.numpy

from mpitp.checkpoint.safetensors_file import FLOAT_DTYPES, SafetensorsFile
from tests.fuzz.bases import FIELDS, write_gguf_file
from tests.fuzz.case import Case, is_other_kind, json_of, rewrite, tokens
from tests.fuzz.mutations import damage_bytes, damage_safetensors


def damage_config(rng: random.Random, case: Case) -> None:
    name = rng.choice(["config.json"] * 3 + ["generation_config.json"])
    case.told = rewrite(case.folder / "m" / name, rng)


READ_BY_ALL = {"eos_token_id", "bos_token_id", "model_type", *(key for fields in FIELDS.values() for key in fields)}


def check_config(case: Case) -> list[str]:
    now, before = (json_of(folder / "m" / "config.json") for folder in (case.folder, case.base))
    ends = [json_of(folder / "m" / "generation_config.json").get("eos_token_id") for folder in (case.folder, case.base)]
    keys = [key for key in READ_BY_ALL if key in before]
    if ends[0] == ends[1] and all(key in now and now[key] == before[key] for key in keys):
        passed = set(now) - set(before)
        return [] if tokens(case) == case.whole else [f"other tokens, with the keys {passed}"]
    may_be_lists = ("eos_token_id",)
    return [
        f"accepted {key} of another type: {now[key]!r:.60}"
        for key in keys
        if key in now and is_other_kind(before[key], now[key]) and key not in may_be_lists
    ]


def damage_weights(rng: random.Random, case: Case) -> None:
    path = case.folder / "m" / "model.safetensors"
    content, case.told = damage_safetensors(rng, path.read_bytes())
    path.write_bytes(content)


def check_weights(case: Case) -> list[str]:
    return _unlike_reference(case.folder / "m" / "model.safetensors", case.base / "m" / "model.safetensors")


def _unlike_reference(path: Path, base: Path) -> list[str]:
    """How our reading of an accepted file differs from the library's, and its tensors from those that there must be."""
    try:
        expected = safetensors.numpy.load_file(path)
    except Exception as error:  # the library's own kind, and NumPy's
        return [f"accepted what the safetensors library refuses: {error}"]
    shapes = {name: array.shape for name, array in safetensors.numpy.load_file(base).items()}
    faults = []
    if {name: array.shape for name, array in expected.items()} != shapes:
        faults.append("accepted other tensors than the model has")
    with SafetensorsFile(path) as file:
        for name, array in expected.items():
            if file.tensors[name].dtype in FLOAT_DTYPES:
                out = np.empty(array.shape, np.float32)
                file.read(name, out)
                with np.errstate(all="ignore"):
                    same = np.array_equal(out, array.astype(np.float32), equal_nan=True)
                faults += [] if same else [f"{name} is read as other numbers than by the library"]
    return faults


def damage_shards(rng: random.Random, case: Case) -> None:
    folder = case.folder / "m"
    shard = folder / f"model-0000{rng.choice('12')}-of-00002.safetensors"
    kind = rng.randrange(8)
    if kind < 5:
        case.told = rewrite(folder / "model.safetensors.index.json", rng, 0.85)
    elif kind < 7:
        content, case.told = damage_safetensors(rng, shard.read_bytes())
        shard.write_bytes(content)
    else:
        shard.unlink()
        case.told = "a shard is missing"


def check_shards(case: Case) -> list[str]:
    same = True
    for number in "12":
        name = f"model-0000{number}-of-00002.safetensors"
        if (case.folder / "m" / name).read_bytes() != (case.base / "m" / name).read_bytes():
            same = False
            if faults := _unlike_reference(case.folder / "m" / name, case.base / "m" / name):
                return faults
    return ["the same shards gave other tokens"] if same and tokens(case) != case.whole else []


HOSTILE_LISTS = [[0], [1], [9], [-1], ["a"], ["x x"], [1.5], [math.nan], [True], [2**31 - 1], [""]]
HOSTILE_METADATA = [
    *(0, 1, 2, 3, 7, 2**16, 2**31, 2**32 - 1, -1.0, -0.5, 0.0, 1e30, math.nan, math.inf, True, False, None),
    *("", "x", "1", "bytes", "gpt2", "llama", "qwen2", "\x00", "{{ '" * 1000),
    *HOSTILE_LISTS,
]


def _hostile_metadata(rng: random.Random, before: Any) -> Any:
    """Another value in the place of `before`; often a list as long, of something else."""
    value = rng.choice(HOSTILE_LISTS if isinstance(before, list) and rng.random() < 0.8 else HOSTILE_METADATA)
    if not isinstance(value, list):
        return value
    length = len(before) if isinstance(before, list) and rng.random() < 0.8 else rng.choice([1, 3, 1000])
    if isinstance(before, list) and type(before[0]) is type(value[0]) and rng.random() < 0.5:
        place = rng.randrange(len(before))
        return [*before[:place], *value, *before[place + 1 :]]
    return value * length


def damage_gguf(rng: random.Random, case: Case) -> None:
    path = case.folder / "model.gguf"
    content = path.read_bytes()
    reader = gguf.GGUFReader(path)
    if rng.random() < 0.4:
        key = rng.choice([name for name in reader.fields if name.startswith(("llama.", "tokenizer."))])
        value = _hostile_metadata(rng, reader.fields[key].contents())
        case.told = f"{key} = {value!r:.40}"
        write_gguf_file(path, case.base.name.removeprefix("gguf-"), **{key.replace(".", "__"): value})
        return
    data = reader.data_offset
    at = rng.choice([(0, 24), (0, data), (0, data), (0, data), (data - 2000, data), (data, len(content))])
    if rng.random() < 0.3:  # a number in the header
        place = rng.randrange(*at) & ~3
        value = rng.choice([0, 1, 2, 7, 8, 9, 2**16, 2**31 - 1, 2**31, 2**32 - 1])
        content = content[:place] + value.to_bytes(4, "little") + content[place + 4 :]
        case.told = f"{value} at {place}"
    else:
        content = damage_bytes(rng, content, at)
        case.told = f"bytes in {at}"
    path.write_bytes(content)


def check_gguf(case: Case) -> list[str]:
    reader = gguf.GGUFReader(case.folder / "model.gguf")
    expected = {}
    for tensor in reader.tensors:
        values = np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
        expected[tensor.name] = np.sort(values, axis=None)  # whatever the order of rows
    saved = safetensors.numpy.load_file(case.folder / "out" / "model.safetensors")
    found = sorted((np.sort(array, axis=None) for array in saved.values()), key=bytes)
    wanted = sorted((array for name, array in expected.items() if "rope_freqs" not in name), key=bytes)
    same = len(found) == len(wanted) and all(map(np.array_equal, found, wanted))
    return [] if same else ["other weights than the gguf package reads"]
