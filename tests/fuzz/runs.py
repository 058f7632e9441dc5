"""Run files, token files and checkpoints: damaged, and what must hold where `mpitp train` accepts them."""

from __future__ import annotations

import json
import random
import tomllib
from typing import Any

from tests.fuzz.case import Case, is_other_kind, rewrite
from tests.fuzz.mutations import damage_bytes, damage_safetensors, damage_toml


def damage_run_file(rng: random.Random, case: Case) -> None:
    path = case.folder / "run.toml"
    if rng.random() < 0.25:
        path.write_bytes(damage_bytes(rng, path.read_bytes()))
        case.told = "bytes"
    else:
        text, case.told = damage_toml(rng, path.read_text())
        path.write_text(text)


def losses(case: Case) -> Any:
    lines = (case.folder / "r" / "metrics.jsonl").read_text().splitlines()
    return [(entry["step"], entry.get("loss"), entry.get("valid_loss")) for entry in map(json.loads, lines)]


def check_run_file(case: Case) -> list[str]:
    try:
        now = tomllib.loads((case.folder / "run.toml").read_text("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        return [f"accepted what tomllib refuses: {error}"]
    before = tomllib.loads((case.base / "run.toml").read_text())
    now["train"] |= {key: before["train"][key] for key in SET}
    if now == before:
        return [] if losses(case) == case.whole else ["the same file gave other losses"]
    return [
        f"accepted {section}.{key} of another type: {now[section][key]!r:.60}"
        for section, table in before.items()
        for key, value in table.items()
        if key in now.get(section, {}) and key not in SET and is_other_kind(value, now[section][key])
    ]


SET = ("steps", "run_dir")  # by the command


def damage_data(rng: random.Random, case: Case) -> None:
    name = rng.choice(["manifest.json"] * 4 + ["tokens.bin"] * 2 + ["tokenizer/tokenizer.json"])
    path = case.folder / "d" / name
    if name == "tokens.bin":
        path.write_bytes(damage_bytes(rng, path.read_bytes()))
        case.told = "tokens.bin: bytes"
    else:
        case.told = rewrite(path, rng)


def check_losses(case: Case) -> list[str]:
    return [] if losses(case) == case.whole else [f"other losses: {losses(case)}, expected {case.whole}"]


def damage_checkpoint(rng: random.Random, case: Case) -> None:
    run_dir = case.folder / "r"
    files = sorted(path for path in (run_dir / "checkpoints").rglob("*") if path.is_file())
    newest = [path for path in files if "00000002" in str(path)]
    states = [path for path in newest if path.name in ("state.json", "manifest.json")]
    path = rng.choice([*newest, *states, *states, *files, run_dir / "metrics.jsonl"])
    if path.suffix == ".safetensors":
        content, told = damage_safetensors(rng, path.read_bytes())
        path.write_bytes(content)
    elif path.suffix == ".jsonl" or rng.random() < 0.05:
        path.write_bytes(damage_bytes(rng, path.read_bytes()))
        told = "bytes"
    else:
        told = rewrite(path, rng)
    if rng.random() < 0.5:
        case.commands[0][-1] = "r/checkpoints/step-00000002"
    case.told = f"{path.relative_to(run_dir)}: {told}"


def final_model(case: Case) -> Any:
    return (case.folder / "r" / "model" / "model.safetensors").read_bytes()


def check_resumed(case: Case) -> list[str]:
    return [] if final_model(case) == case.whole else ["another model than of the undisturbed run"]
