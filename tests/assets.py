"""Real models for tests, fetched and converted once and kept in .cache/assets."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from mpitp.errors import FileError

ROOT = Path(__file__).resolve().parent.parent
CONVERTED = ROOT / ".cache" / "assets" / "converted"


def fetch(name: str) -> Path:
    """The path that scripts/fetch_assets.py gives for an asset."""
    command = [sys.executable, str(ROOT / "scripts" / "fetch_assets.py"), name]
    return Path(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip())


def smollm2_directory() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory, float32."""
    from mpitp.convert.gguf_to_hf import convert_gguf

    return _converted("smollm2", lambda target: convert_gguf(fetch("smollm2"), target))


def glassllm_directory() -> Path:
    """glassllm's English model as a Hugging Face directory."""
    script = str(ROOT / "scripts" / "convert_glassllm.py")
    package = fetch("glassllm")
    return _converted("glassllm", lambda target: subprocess.run([sys.executable, script, package, target], check=True))


def _converted(name: str, convert: Callable[[Path], object]) -> Path:
    """The converted directory; it is published whole, so when two processes make it, the later one finds it there."""
    target = CONVERTED / name
    if not target.is_dir():
        try:
            convert(target)
        except (FileError, subprocess.CalledProcessError):
            if not target.is_dir():
                raise
    return target
