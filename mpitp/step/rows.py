"""A row for each rank, with its place in the mesh: who does what when, and which message goes where, as text."""

from __future__ import annotations

from collections.abc import Iterator

from mpitp.step.film import UPDATE, WEIGHT_GRADS, Film, Op

AXIS_SIGNS = {"pp": "P", "dp": "D", "cp": "C", "tp": "T"}  # of collectives over ranks along an axis
OVER_SEVERAL = "*"
_MESSAGES = {"send": ">", "recv": "<"}
LEGEND = (
    "f, b, u: own work, forward, backward, update; w: weight gradients put off;",
    "T, C, D, P: a collective over tp, cp, dp, pp (*: over several); > send, < receive.",
    "Who has no letter in a column waits.",
)
_LEAST_COLUMNS = 16


def name_of(film: Film, rank: int) -> str:
    """The rank with its coordinates: "rank 3 (pp 1, dp 1)"."""
    return f"rank {rank} ({film.places[rank]})" if film.places else f"rank {rank}"


def turn_of(film: Film, op: Op) -> str:
    """To which microbatch it belongs, in words, where there is a mesh and it is of one."""
    return f" of microbatch {op.microbatch}" if film.places and op.phase != UPDATE else ""


def row_lines(film: Film, width: int, now: int = 0) -> list[str]:
    """The rows, as many columns beside each other as there is room for; then the messages. `now`: an operation that is
    marked.
    """
    names = [name_of(film, rank) for rank in range(film.ranks)]
    label = max(map(len, names)) + 1
    room, columns = max(width - label, _LEAST_COLUMNS), max(op.column for op in film.ops)
    lines = [film.title, *LEGEND]
    marked = {op.column for op in film.ops if op.number == now}
    for first in range(1, columns + 1, room):
        shown = range(first, min(first + room, columns + 1))
        pointer = "".join("v" if column in marked else " " for column in shown)
        lines.append((" " * label + pointer).rstrip())
        for rank, signs in enumerate(_signs(film)):
            row = "".join(signs.get(column, " ") for column in shown)
            lines.append(f"{names[rank]:{label}}{row}".rstrip())
    return [*lines, "", *_arrows(film)]


def _signs(film: Film) -> Iterator[dict[int, str]]:
    """The sign of every column of each rank."""
    for rank in range(film.ranks):
        yield {op.column: _sign(op) for op in film.ops if rank in op.ranks}


def _sign(op: Op) -> str:
    if op.collective in _MESSAGES:
        return _MESSAGES[op.collective]
    own = "w" if op.title == WEIGHT_GRADS else op.phase[0]
    return AXIS_SIGNS.get(op.axis, OVER_SEVERAL) if op.collective else own


def _arrows(film: Film) -> Iterator[str]:
    """A line for each send, with its receive."""
    for op in film.ops:
        if op.collective == "send":
            what = f"{op.made.name} of microbatch {op.microbatch}"
            yield f"op {op.number:3} -> {op.other_end:3}: {what}, {op.layer} ({op.axis}), {ways(op)}"


def ways(op: Op) -> str:
    """From which rank to which a message goes: "0 > 2, 1 > 3"."""
    ends = zip(op.ranks, op.peers, strict=True) if op.collective == "send" else zip(op.peers, op.ranks, strict=True)
    return ", ".join(f"{source} > {dest}" for source, dest in ends)
