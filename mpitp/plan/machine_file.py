r"""A machine in numbers: what a step's time is worked out from. Read from a TOML file, or written to one.

| part            | what it says                                                                                |
|-----------------|---------------------------------------------------------------------------------------------|
| `machine`       | name; ranks, cores a node; bytes a rank has                                                 |
| `compute`       | a rank's passes over memory, exponentials, optimizer; the start of a step, of an operation  |
| `products`      | for each dtype rows [m, n, k, flop/s]: the rate of [m, k] times [k, n] on one rank          |
| `attention`     | for each dtype rows [tokens, width, forward, backward]: scores a second; left out: in parts |
| `in_node`       | one message, sums by ranks and size, sends, how much of a sum runs behind products          |
| `between_nodes` | the same between ranks of different nodes, and a node's links; left out: there is one node  |

Between the rows of a table a value is interpolated, and never leaves the range of the rows: no cost is below what the
best row allows, on which the search's bounds rest.

A sum of n bytes over p ranks (an all-reduce; n bytes are what each rank hands over) takes

    latency ceil(log2 p) + n / B(p, n)

with B by interpolation; an all-gather or a reduce-scatter of n bytes in all takes half of the second term. Over several
nodes a group of p ranks, r of them in each of q nodes, sums in the node and then, each link its part, between nodes:

    S_in(n, r) + S_between(n / min(r, links), q) max(1, groups min(r, links) / links)

where `groups` of a node do so at a time. The rates of rows are those of one rank alone on one link.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from mpitp.config import AT_LEAST_1, DTYPES, Rule, Section, Table, key, make_section, one_of
from mpitp.errors import ConfigError, FileError
from mpitp.files import read_regular, replace_file
from mpitp.text import decode_text

MOST_BYTES = 1 << 22


def between(least: float, most: float) -> Rule:
    """A number that some machine could have."""
    return Rule(lambda x: least <= x <= most, f"from {least:g} to {most:g}")


def _rows(length: int, least: float, most: float, rates: int = 1, first: int = 1) -> Rule:
    """Rows of sizes, of which the first is at least `first`, that end in rates."""

    def is_row(row: Sequence[float]) -> bool:
        sizes, ends = row[: length - rates], row[length - rates :]
        if len(row) != length or row[0] < first or min(sizes) < 1:
            return False
        return all(least <= rate <= most for rate in ends)

    told = "at the end a rate" if rates == 1 else f"at the end {rates} rates"
    from_two = f", the first from {first} on," if first > 1 else ""
    label = f"of {length} each, sizes of at least 1{from_two} and {told} from {least:g} to {most:g}"
    return Rule(lambda rows: all(map(is_row, rows)), label)


FLOPS = (1e6, 1e17)  # of one rank: an old core in Python to a thousand times today's fastest GPU
RATE = (1e5, 1e15)  # bytes a second
SECONDS = between(0, 1)
ONE_LINE = Rule(lambda text: bool(text.strip()) and text.isprintable(), "of one line of printable characters")
OVERLAP = between(0, 1)
PRODUCTS = _rows(4, *FLOPS)
SUMS = _rows(3, *RATE, first=2)
PASSES = _rows(2, *RATE)
SCORES = _rows(4, *RATE, rates=2)


@dataclass(frozen=True)
class MachineSection(Section):
    """The nodes."""

    section: ClassVar[str] = "machine"
    name: str = key("what it is called", rule=ONE_LINE)
    ranks_per_node: int = key("ranks that run on one node", rule=AT_LEAST_1)
    cores_per_node: int = key("cores of one node", rule=AT_LEAST_1)
    memory_bytes: float = key("bytes that one rank has for its arrays", rule=between(1 << 20, 1e15))
    device: str = key("where arrays live", "cpu", one_of("cpu", "gpu"))


@dataclass(frozen=True)
class ComputeSection(Section):
    """One rank's work apart from products."""

    section: ClassVar[str] = "compute"
    passes: Table = key("rows [bytes, bytes/s]: a pass that reads and writes so much", rule=PASSES)
    exps_per_second: float = key("exponentials a second, as in softmax and GELU", rule=between(1e4, 1e16))
    optimizer_bytes_per_second: float = key("bytes that AdamW reads and writes a second", rule=between(*RATE))
    step_seconds: float = key("start of a step: batches, log, Python", rule=SECONDS)
    operation_seconds: float = key("start of one operation on arrays, Python included", rule=SECONDS)
    added_row_seconds: float = key("one row added to a table's gradient, where rows go one by one", 0.0, SECONDS)

    def check(self) -> None:
        _check_filled("compute.passes", self.passes, "[1e8, 1e10]")

    @cached_property
    def _rates(self) -> dict[float, float]:
        return {}

    def pass_rate(self, num_bytes: float) -> float:
        """Bytes a second of one pass that reads and writes so many."""
        if num_bytes not in self._rates:
            self._rates[num_bytes] = along(self.passes, num_bytes)
        return self._rates[num_bytes]

    def pass_seconds(self, num_bytes: float) -> float:
        """Of such a pass, its start included."""
        return self.operation_seconds + num_bytes / self.pass_rate(num_bytes) if num_bytes else 0.0


@dataclass(frozen=True)
class ProductsSection(Section):
    """Rates of matrix products."""

    section: ClassVar[str] = "products"
    float32: Table = key("rows [m, n, k, flop/s]", (), PRODUCTS)
    float64: Table = key("rows [m, n, k, flop/s]", (), PRODUCTS)
    bfloat16: Table = key("rows [m, n, k, flop/s]", (), PRODUCTS)
    float16: Table = key("rows [m, n, k, flop/s]", (), PRODUCTS)

    def check(self) -> None:
        if not any(getattr(self, dtype) for dtype in DTYPES):
            raise ConfigError(
                "products has no row: expected, for one dtype at least, rows [m, n, k, flop/s] such as "
                "float32 = [[1024, 1024, 1024, 1e11]]"
            )

    def of(self, dtype: str) -> Table:
        """The rows of a dtype. Raises ConfigError where there are none."""
        if rows := getattr(self, dtype):
            return rows
        known = ", ".join(name for name in DTYPES if getattr(self, name))
        raise ConfigError(
            f"the machine file has no products.{dtype}, but the model is of dtype {dtype} (it has {known}); add rows "
            f"[m, n, k, flop/s], measured by `mpitp bench machine`"
        )

    @cached_property
    def _known(self) -> dict[tuple[str, float, float, float], float]:
        return {}

    def rate(self, dtype: str, m: float, n: float, k: float) -> float:
        """Flops a second of [m, k] times [k, n]."""
        shape = dtype, m, n, k
        if shape not in self._known:
            self._known[shape] = between_rows(self.of(dtype), (m, n, k))
        return self._known[shape]


@dataclass(frozen=True)
class AttentionSection(Section):
    """Rates of attention over a sequence, with all that its heads do."""

    section: ClassVar[str] = "attention"
    float32: Table = key("rows [tokens, width of a head, scores/s forward, backward]", (), SCORES)
    float64: Table = key("rows [tokens, width of a head, scores/s forward, backward]", (), SCORES)
    bfloat16: Table = key("rows [tokens, width of a head, scores/s forward, backward]", (), SCORES)
    float16: Table = key("rows [tokens, width of a head, scores/s forward, backward]", (), SCORES)

    @cached_property
    def _known(self) -> dict[tuple[str, int, int, bool], float]:
        return {}

    def rate(self, dtype: str, tokens: int, width: int, *, is_backward: bool) -> float:
        """Elements of scores a second, of heads of a width over a sequence; 0 where there are no rows of the dtype."""
        shape = dtype, tokens, width, is_backward
        if shape not in self._known:
            rows = [(*row[:2], row[2 + is_backward]) for row in getattr(self, dtype)]
            self._known[shape] = between_rows(rows, (tokens, width)) if rows else 0.0
        return self._known[shape]


@dataclass(frozen=True)
class Level(Section):
    """Communication between ranks of a node."""

    section: ClassVar[str] = "in_node"
    latency_seconds: float = key("of one message", rule=SECONDS)
    sums: Table = key("rows [ranks, bytes, bytes/s]: an all-reduce of so many bytes a rank", rule=SUMS)
    send_bytes_per_second: float = key("of one message from rank to rank", rule=between(*RATE))
    overlap: float = key("the part of a started sum that runs behind products, 0 to 1", 0.0, OVERLAP)
    links: int = key("sums of different groups of a node that run at full speed at a time", 1, AT_LEAST_1)

    def check(self) -> None:
        _check_filled(f"{self.section}.sums", self.sums, "[2, 1e8, 1e10]")

    @cached_property
    def _rates(self) -> dict[tuple[int, float], float]:
        return {}

    def latency(self, ranks: int) -> float:
        """Of a collective over so many ranks."""
        return self.latency_seconds * math.ceil(math.log2(max(ranks, 1)))

    def transfer(self, num_bytes: float, ranks: int) -> float:
        """Of a sum, its latency left out."""
        if ranks <= 1 or not num_bytes:
            return 0.0
        if (ranks, num_bytes) not in self._rates:
            self._rates[ranks, num_bytes] = sum_rate(self.sums, ranks, num_bytes)
        return num_bytes / self._rates[ranks, num_bytes]

    def send_seconds(self, num_bytes: float) -> float:
        """Of one message."""
        return self.latency_seconds + num_bytes / self.send_bytes_per_second


@dataclass(frozen=True)
class WideLevel(Level):
    """Communication between nodes."""

    section: ClassVar[str] = "between_nodes"


@dataclass(frozen=True)
class Machine:
    """All of it."""

    machine: MachineSection
    compute: ComputeSection
    products: ProductsSection
    in_node: Level
    between_nodes: WideLevel | None = None
    attention: AttentionSection | None = None

    @property
    def most_ranks(self) -> float:
        """Ranks that there is room for: those of a node, where nothing is told of others."""
        return math.inf if self.between_nodes else self.machine.ranks_per_node

    def send(self, num_bytes: float, is_wide: bool) -> float:
        """Seconds of one message."""
        return self._level(is_wide).send_seconds(num_bytes)

    def overlap(self, nodes: int) -> float:
        """The part of a started sum over so many nodes that runs behind products."""
        return self._level(nodes > 1).overlap

    def sum_seconds(self, num_bytes: float, in_node: int, nodes: int = 1, share: float = 1.0) -> float:
        """Of a sum over `in_node` ranks of each of `nodes`; `share`: 1 for an all-reduce, 1/2 for half of one."""
        own = self.in_node
        seconds = own.latency(in_node) + share * own.transfer(num_bytes, in_node)
        if nodes == 1:
            return seconds
        wide = self._level(True)
        lanes = min(in_node, wide.links)
        crowd = max(1.0, self.machine.ranks_per_node // in_node * lanes / wide.links)
        return seconds + wide.latency(nodes) + share * crowd * wide.transfer(num_bytes / lanes, nodes)

    def all_to_all_seconds(self, num_bytes: float, in_node: int, nodes: int = 1) -> float:
        """Of an exchange in which each of `in_node` ranks of each of `nodes` has `num_bytes` for all of them together:
        a message to every other one. All ranks of a node send at a time, over its links.
        """
        size = in_node * nodes
        seconds = (in_node - 1) * self.in_node.send_seconds(num_bytes / size)
        if nodes == 1:
            return seconds
        wide = self._level(True)
        crowd = max(1.0, self.machine.ranks_per_node / wide.links)
        return seconds + (size - in_node) * wide.send_seconds(crowd * num_bytes / size)

    def _level(self, is_wide: bool) -> Level:
        if not is_wide:
            return self.in_node
        if self.between_nodes is None:
            raise ConfigError(
                f"the machine file tells of one node of {self.machine.ranks_per_node} ranks and has no "
                "[between_nodes]; add it, or take no more ranks than a node has"
            )
        return self.between_nodes


_PARTS: dict[str, type[Section]] = {
    "machine": MachineSection,
    "compute": ComputeSection,
    "products": ProductsSection,
    "attention": AttentionSection,
    "in_node": Level,
    "between_nodes": WideLevel,
}


def read_machine(path: str | Path) -> Machine:
    """Read a machine file. Raises ConfigError, with the file, for what is missing, unknown or absurd."""
    try:
        tables = tomllib.loads(decode_text(read_regular(path, MOST_BYTES), path))
    except OSError as error:
        raise ConfigError(f"can't read the machine file {path}: {error.strerror or error}") from error
    except FileError as error:
        raise ConfigError(f"the machine file: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not a TOML file: {error}") from error
    try:
        return machine_from(tables)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def machine_from(tables: Mapping[str, Any]) -> Machine:
    """A machine from nested dictionaries, as TOML gives them."""
    for name, table in tables.items():
        if name not in _PARTS or not isinstance(table, Mapping):
            raise ConfigError(f"a machine file has no {name} of this kind; its sections are {', '.join(_PARTS)}")
    for name in ("machine", "compute", "products", "in_node"):
        if name not in tables:
            raise ConfigError(f"[{name}] is missing: {(_PARTS[name].__doc__ or '').lower()}")
    return Machine(**{name: make_section(_PARTS[name], table) for name, table in tables.items()})  # type: ignore[arg-type]


def write_machine(machine: Machine, path: str | Path) -> None:
    """Write a machine file, by rename."""
    replace_file(Path(path), machine_text(machine))


def machine_text(machine: Machine) -> str:
    """A machine as TOML, each key with what it means."""
    lines: list[str] = []
    for field in dataclasses.fields(machine):
        section = getattr(machine, field.name)
        if section is not None:
            lines += [f"[{field.name}]", *_section_lines(section), ""]
    return "\n".join(lines)


def _section_lines(section: Section) -> list[str]:
    lines = []
    for field in dataclasses.fields(section):  # type: ignore[arg-type]
        value = getattr(section, field.name)
        if value != ():
            lines.append(f"{field.name} = {toml_value(value)}  # {field.metadata['help']}")
    return lines


def toml_value(value: Any) -> str:
    """A value as TOML has it; a table of numbers with a line for each row."""
    if isinstance(value, tuple):
        return "[\n" + "".join(f"  [{', '.join(map(toml_value, row))}],\n" for row in value) + "]"
    if isinstance(value, list):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e6:
        return str(int(value))
    return f'"{_escaped(value)}"' if isinstance(value, str) else repr(value)


def _escaped(text: str) -> str:
    """As TOML's basic strings want it."""
    return "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08X}" for c in text)


def _check_filled(label: str, rows: Table, example: str) -> None:
    if not rows:
        raise ConfigError(f"{label} is empty: expected one row at least, such as {example}")


def between_rows(rows: Iterable[Sequence[float]], point: Sequence[float]) -> float:
    """A rate (the last number of a row) between measured sizes: the mean of the rows' logarithms, weighted by 1 / d^4
    with d the distance of the sizes' logarithms (Shepard 1968, "A two-dimensional interpolation function for
    irregularly-spaced data").
    """
    place = [math.log(max(x, 1)) for x in point]
    total = weights = 0.0
    for *sizes, rate in rows:
        square = sum((math.log(x) - y) ** 2 for x, y in zip(sizes, place, strict=True))
        if square < 1e-12:
            return rate
        total += math.log(rate) / square**2
        weights += 1 / square**2
    return math.exp(total / weights)


def sum_rate(rows: Table, ranks: int, num_bytes: float) -> float:
    """Bytes a second of a sum: by size for each measured number of ranks, then by ranks."""
    counts = sorted({row[0] for row in rows})
    by_count = tuple((count, along(tuple(row[1:] for row in rows if row[0] == count), num_bytes)) for count in counts)
    return along(by_count, ranks)


def along(rows: Table, x: float) -> float:
    """The rate at x between rows (x, rate): straight in the logarithms, level outside of them."""
    ordered = sorted(rows)
    if x <= ordered[0][0] or x >= ordered[-1][0]:
        return ordered[0][1] if x <= ordered[0][0] else ordered[-1][1]
    place = next(i for i, row in enumerate(ordered) if row[0] >= x)
    (low, first), (high, second) = ordered[place - 1], ordered[place]
    part = math.log(x / low) / math.log(high / low)
    return math.exp((1 - part) * math.log(first) + part * math.log(second))
