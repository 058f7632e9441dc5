"""One operation as lines of text that fit a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpitp.step.code import code_of, example_text, example_title, told_place
from mpitp.step.film import UPDATE, Array, Film, Op, legend
from mpitp.step.products import products_of
from mpitp.step.rows import name_of, turn_of, ways
from mpitp.step.sends import ALGORITHMS, kind_of, told_rounds
from mpitp.step.tour import guide
from mpitp.step.values import fits, panels, rows_of

WIDTH, HEIGHT = 80, 24  # a terminal that shows everything
KEYS = (
    "n next  p back  c to break  x next collective  X previous  j conjugate  g go to",
    "a array  r rank  v shade  w why  s sends  m rows  b break  t predict  ?  q quit",
)
SHORT_KEYS = ("n next  p back  ? all keys  q quit",)
HELP = """\
mpitp step: a forward and a backward pass of all ranks, operation by operation

  n  space  right   next operation
  p  left           the one before
  c  C              run to the next, the last breakpoint
  x  X              next, previous collective
  j                 the conjugate: what the other pass does there
  g                 go to an operation by its number
  a  A              next, previous array of this operation
  r                 all ranks side by side, or one rank over the whole width
  v                 numbers, or shades of magnitude
  w                 why it is there, what breaks without it, and its code
  e                 the examples that teach it, line by line
  s                 what a collective sends, round by round
  b                 set or clear a breakpoint: a part of a layer's name,
                    or "collectives"
  t                 predict: a question before each operation, and a score
  l                 list of all operations
  m                 a row for each rank, and the messages between them
  ?                 this page
  q  Ctrl-C         quit

An array that differs in shape between ranks is written [4, 2|1|1].
Held: parameters, their gradients, and what forward keeps for backward.
A microbatch of a pipeline is told by its number; a message is a send and,
at another place, its receive (j: what comes back the other way).
The letter beside an array says what the ranks hold (along tp, or along
each axis that is named):"""

_LEAST_PANEL = 7  # lines that an array gets before remarks are left out


@dataclass(frozen=True, slots=True)
class View:
    """What of an operation is shown: array `array` of it (None: what it makes), rank `rank` (None: all ranks)."""

    array: int | None = None
    rank: int | None = None
    shades: bool = False


def op_lines(film: Film, op: Op, view: View, width: int = 80, height: int = 20) -> list[str]:
    """The operation in at most `width` columns and `height` lines; where lines are scarce, remarks are left out."""
    index = op.arrays.index(op.made) if view.array is None else view.array % len(op.arrays)
    head = [_head(film, op, width), *wrapped(f"    {op.equation}", width)]
    arrays = [_array_line(array, "> " if i == index else "  ", width) for i, array in enumerate(op.arrays)]
    below = [*_traffic(film, op), *_memory(op)]
    free = height - len(head) - len(arrays) - len(below)
    shows_sum = bool(op.collective) and len(op.groups) == 1 and view.array is None and not op.peers
    panel_rows = sum(_rows(array) + 2 for array in (op.arrays if shows_sum else [op.arrays[index]]))
    free -= min(panel_rows, 2 * _LEAST_PANEL if shows_sum else _LEAST_PANEL)
    note, pair = wrapped(f"    {op.note}", width) if op.note else [], _pair(op)
    blanks = []
    for remark, where in ((_tokens(film, op, width), head), (note, head), (pair, below)):
        if len(remark) <= free:
            where += remark
            free -= len(remark)
    for _ in range(3):
        blanks.append([""] if free > 0 else [])
        free -= 1
    used = len(head) + len(arrays) + len(below) + sum(map(len, blanks))
    room, array = max(height - used, 4), op.arrays[index]
    if shows_sum:
        panel = _sum(op, view, width, room)
    else:
        panel = _all_panels(film, op, view, width, room) or _panel(film, op, array, view, width, room)
    lines = [*head, *blanks[2], *arrays, *blanks[0], *panel, *blanks[1], *below]
    return [line[:width] for line in lines[:height]]


def why_lines(op: Op, width: int = 80) -> list[str]:
    """Why the operation is there, what would break without it, the examples that teach it, and the code that ran."""
    told = guide(op)
    lines = [f"{op.layer}: {op.collective or op.title}", "", *wrapped(f"  {told.why}", width)]
    lines += [*wrapped(f"  {told.without}", width), ""]
    lines += [f"  python examples/{name}" for name in told.examples] + ["  (key e shows their lines)"]
    return [*lines, "", told_place(op.code), "", *code_of(op.code).splitlines()]


def example_lines(op: Op) -> list[str]:
    """The scripts of the course that teach it, one after the other."""
    lines = []
    for name in guide(op).examples:
        lines += [example_title(name), f"python examples/{name}", ""]
        text = example_text(name) or "its lines aren't at hand: they are in the project's repository"
        lines += [*text.splitlines(), ""]
    return lines


def send_lines(op: Op, width: int = 80) -> list[str]:
    """The messages of a collective by each algorithm, round by round."""
    ranks = max((len(group) for group in op.groups), default=1)
    lines = [f"{op.layer}: {op.collective}, {ranks} ranks"]
    for name, make in ALGORITHMS.get(kind_of(op.collective), {}).items():
        lines += ["", f"{name}:"]
        for line in told_rounds(make(ranks)) or ["nothing is sent"]:
            lines += wrapped(f"  {line}", width)
    return lines


def help_lines() -> list[str]:
    """The keys, and what the letters mean."""
    return [*HELP.splitlines(), *(f"  {line}" for line in legend())]


def list_lines(film: Film) -> list[str]:
    """One line an operation."""
    lines = [film.title, *film.facts, ""]
    width = max([26, *(len(op.layer) for op in film.ops if op.phase != UPDATE)])
    for op in film.ops:
        what = f"{op.collective} of {_bytes(max(op.given_bytes))} a rank" if op.collective else op.title
        what = f"{op.title}: {ways(op)}" if op.peers else what
        turn = f"{op.microbatch if op.phase != UPDATE else '':3} " if film.places else ""
        lines.append(f"{op.number:4} {op.phase:8} {turn}{op.layer:{width}} {what}")
    return lines


def _head(film: Film, op: Op, width: int) -> str:
    what = op.collective.upper() if op.collective else op.title
    phase = op.phase + turn_of(film, op)
    over = f" over {op.axis}" if film.places and op.collective else ""
    return f"{op.number}/{len(film.ops)} {phase}  {op.layer}: {what}{over}"[:width]


def _array_line(array: Array, cursor: str, width: int) -> str:
    role = {"in": "in", "param": "param", "mid": "via", "out": "makes", "grad": "grad"}[array.role]
    text = f"{cursor}{role:6}{array.name:11} {array.shape_text:18} {array.placement_text}"
    return text[:width]


def _panel(film: Film, op: Op, array: Array, view: View, width: int, height: int) -> list[str]:
    count = len(array.pictures)
    places = range(count) if view.rank is None else [view.rank % count]
    ranks = [op.ranks[place] for place in places]
    names = [f"{array.name}, {name_of(film, rank)}" if len(ranks) == 1 else f"rank {rank}" for rank in ranks]
    return panels([array.pictures[place] for place in places], names, width, height, shades=view.shades)


def _all_panels(film: Film, op: Op, view: View, width: int, height: int) -> list[str]:
    """All arrays in the order of the equation, where there is room for them; else nothing."""
    if view != View() or len(op.arrays) < 2 or not all(p.is_whole for array in op.arrays for p in array.pictures):
        return []
    products = products_of(op.equation, [array.name for array in op.arrays])
    order = [name for product in products for name in (product.left, product.right, product.out)]
    arrays = sorted(op.arrays, key=lambda array: order.index(array.name) if array.name in order else len(order))
    lines: list[str] = []
    for array in arrays:
        names = [f"{array.name}, {name_of(film, rank)}" for rank in op.ranks]
        lines += [""] * bool(lines) + panels(list(array.pictures), names, width, height + 1, shades=False)
    return lines if len(lines) <= height else []


def _tokens(film: Film, op: Op, width: int) -> list[str]:
    """The text of the ids that go in, where there is one."""
    ids = next((a.pictures[0] for a in op.arrays if "ids" in a.name and a.pictures[0].is_integer), None)
    words = [film.words.get(int(value), "") for value in ids.values[0]] if ids and film.words else []
    return wrapped(f"    tokens: {' '.join(repr(word) for word in words)}", width) if words else []


def _sum(op: Op, view: View, width: int, height: int) -> list[str]:
    """What the ranks hand in, then what comes of it: r0 + r1 + r2 = y."""
    given, made, ranks = op.arrays[0], op.arrays[-1], op.ranks
    sign = "+" if "reduce" in op.collective and not op.collective.endswith("max") else "|"
    places = list(range(len(ranks))) if view.rank is None else [view.rank % len(ranks)]
    names = [f"{sign} rank {ranks[place]}" if at else f"rank {ranks[place]}" for at, place in enumerate(places)]
    room = max(height - _rows(made) - 2, height // 2)
    above = panels([given.pictures[place] for place in places], names, width, room, shades=view.shades)
    is_alike = made.letter in "IR"
    after = [0] if is_alike else places
    told = [f"= {made.name}, on every rank"] if is_alike else [f"= rank {ranks[place]}" for place in after]
    pictures = [made.pictures[place] for place in after]
    return above + panels(pictures, told, width, max(height - len(above), 4), shades=view.shades)


def _rows(array: Array) -> int:
    return max(map(rows_of, array.pictures))


def _traffic(film: Film, op: Op) -> list[str]:
    lines = []
    if op.peers:
        lines.append(f"{ways(op)}; its {'receive' if op.collective == 'send' else 'send'} is op {op.other_end}")
    elif op.collective:
        sent = max(op.sent_bytes)
        lines.append(f"each rank hands in {_spread(op.given_bytes)}; a ring sends {_bytes(sent)} from each")
    if op.conjugate is not None:
        other = film.op(op.conjugate)
        what = other.collective or "no communication"
        lines.append(f"conjugate, op {other.number} ({other.phase}): {what}")
    return lines


def _pair(op: Op) -> list[str]:
    return [op.pair] if op.pair and (op.collective or op.conjugate is not None) else []


def _memory(op: Op) -> list[str]:
    params, grads = [m.params for m in op.memory], [m.grads for m in op.memory]
    kept = [m.activations for m in op.memory]
    moments = [m.moments for m in op.memory]
    told = f", moments {_spread(moments)}" if any(moments) else ""
    return [f"held a rank: params {_spread(params)}, grads {_spread(grads)}, kept {_spread(kept)}{told}"]


def _spread(sizes: Sequence[float]) -> str:
    """One size, or the smallest and the largest of all ranks'."""
    low, high = _bytes(min(sizes)), _bytes(max(sizes))
    if low == high:
        return low
    (number, unit), other = low.split(), high.split()[1]
    return f"{number} to {high}" if unit == other else f"{low} to {high}"


def _bytes(size: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.0f} B"


def wrapped(text: str, width: int) -> list[str]:
    """The text broken at spaces, later lines indented as the first."""
    indent = " " * (len(text) - len(text.lstrip()))
    lines, line = [], indent
    for word in text.split():
        if len(line) + len(word) + 1 > width and line.strip():
            lines.append(line)
            line = indent + "  "
        line += ("" if line.endswith(" ") or not line else " ") + word
    return [*lines, line]


def whole_op(film: Film, op: Op, width: int = 80) -> list[str]:
    """The operation with every one of its arrays, one below the other."""
    lines = [film.title, _head(film, op, width), *wrapped(f"    {op.equation}", width)]
    lines += _tokens(film, op, width)
    if op.note:
        lines += wrapped(f"    {op.note}", width)
    for array in op.arrays:
        views = [View()] if fits(list(array.pictures), width) else [View(rank=rank) for rank in range(len(op.ranks))]
        lines += ["", _array_line(array, "", width)]
        for view in views:
            lines += _panel(film, op, array, view, width, 60)
    return [*lines, "", *_traffic(film, op), *_pair(op), *_memory(op)]
