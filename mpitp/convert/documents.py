"""What lies beside a model's weights and goes along with them."""

from __future__ import annotations

from pathlib import Path

from mpitp.checkpoint.hf_directory import INDEX
from mpitp.convert.rounding import DOCUMENTS
from mpitp.files import os_failure


def beside(source: Path) -> dict[str, bytes]:
    """The tokenizer's files and the like."""
    others = {"config.json", "generation_config.json", INDEX}
    paths = [path for pattern in DOCUMENTS for path in source.glob(pattern) if path.name not in others]
    try:
        return {path.name: path.read_bytes() for path in sorted(paths)}
    except OSError as error:
        raise os_failure("read", source, error) from error
