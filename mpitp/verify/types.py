"""The types between all layers of a model, on a mesh without processes: what `mpitp verify --types` checks and shows.

Nothing is computed and nothing allocated, so thousands of ranks are looked at in no time. Letters are those of
`layers/array_type.py`; a type that doesn't fit is a PlacementError which names layer and axis.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mpitp.comm.mesh import abstract_mesh
from mpitp.trace.traffic import folded
from mpitp.verify.source import Source


@dataclass(frozen=True, slots=True)
class TypeRow:
    """A layer, and the letters of what it takes and gives along each axis; blocks that are alike are one row."""

    layer: str
    takes: str
    gives: str
    columns: str  # named parts of the last dim of what it gives, where that is cut


def check_types(source: Source, sizes: dict[str, int]) -> list[TypeRow]:
    """The rows for a mesh of these sizes, as its first, its middle and its last rank see it: they must see the same. Of
    a pipeline's stages all layers are shown, as one stage would see them: what goes between stages keeps its type.
    """
    sizes = {**sizes, "pp": 1}
    ranks = abstract_mesh(sizes).world.size
    seen = [_rows_of(source, sizes, rank) for rank in sorted({0, ranks // 2, ranks - 1})]
    assert all(rows == seen[0] for rows in seen), "the ranks see different types; this is a bug"
    return seen[0]


def _rows_of(source: Source, sizes: dict[str, int], rank: int) -> list[TypeRow]:
    site = source.site_on(abstract_mesh(sizes, rank))
    rows: dict[TypeRow, None] = {}
    for name, typed in source.model.abstract(site).types().items():
        columns = ", ".join(part for part, _ in typed.outgoing.columns)
        rows[TypeRow(folded(name), str(typed.incoming), str(typed.outgoing), columns)] = None
    return list(rows)


def as_text(rows: list[TypeRow], ranks: int) -> str:
    """A line a layer, and what it comes to."""
    cells = [("layer", "takes", "gives", "cut by")] + [(r.layer, r.takes, r.gives, r.columns) for r in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(4)]
    lines = ["  ".join(f"{c:<{w}}" for c, w in zip(line, widths, strict=True)).rstrip() for line in cells]
    return "\n".join([*lines, "", _LEGEND, f"the types fit: {len(rows)} kinds of layers on {ranks} ranks"])


def as_dict(rows: list[TypeRow], ranks: int) -> dict[str, Any]:
    """For JSON."""
    return {"ok": True, "ranks": ranks, "layers": [asdict(row) for row in rows]}


_LEGEND = (
    "I invariant: equal on all ranks    R replicate: equal, each uses it for its own part, gradients to be summed\n"
    "V varying: each rank its own piece    P partial: summands"
)
