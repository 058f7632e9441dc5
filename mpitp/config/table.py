"""The keys of a run file as `mpitp train --help` prints them."""

from __future__ import annotations

import dataclasses
from typing import Any

from mpitp.config.run import SECTIONS
from mpitp.config.section import key_name, own_fields
from mpitp.config.sections import DropoutSection, ModelSection
from mpitp.config.values import show

PATHS_NOTE = (
    "Paths are relative to the current directory (where the command is started), as on any command line;\n"
    "~ and $NAME are expanded, $$ is a dollar sign."
)


def key_table() -> str:
    """Every key of the run file with its default and meaning, for `mpitp train --help`."""
    lines: list[str] = []
    for name, cls in SECTIONS.items():
        lines.append(f"[{name}]")
        rows = [(key_name(field), field) for field in own_fields(cls)]
        if cls is ModelSection:
            rows += [(f"dropout.{field.name}", field) for field in own_fields(DropoutSection)]
        lines += [f"  {label:<18} {_default_words(field):<14} {field.metadata['help']}" for label, field in rows]
    lines.append(
        "In [model], the model's own Hugging Face fields (model_type, hidden_size, ...) may replace from and config."
    )
    lines.append(PATHS_NOTE)
    return "\n".join(lines)


def _default_words(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return "(required)"
    if field.default is None:
        return "-"
    return show(list(field.default)) if isinstance(field.default, tuple) else show(field.default)
