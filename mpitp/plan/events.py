r"""Ranks that compute, wait for one another and share links, event by event.

A program is a list of operations, done one after the other by each rank of a class (`symmetry.py`):

    Work(seconds)           the rank computes
    Meet(kind, ...)         a collective: all members of the group come, then `local` seconds, then a transfer of
                            `wide` seconds (what it takes alone) over the links of its nodes
    Send(step, tag, ...)    a message to the stage behind (+1) or before (-1) starts; the rank goes on
    Take(step, tag)         the message from there is waited for

A node's links carry `lanes` transfers at full speed at a time, each way; more share them evenly, so that a transfer
goes at min(1, links / lanes asked for) of the slowest of its nodes (a fluid model of fair sharing). Whenever a transfer
starts or ends, those that share links with it change their speed.

A rank that dies at a moment does nothing from then on; whoever needs it waits for ever, and the simulation ends when
nothing moves any more.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from mpitp.plan.symmetry import Classes, Places


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds of a rank's own."""

    seconds: float
    label: str


@dataclass(frozen=True, slots=True)
class Meet:
    """A collective of the group of this kind ("tp", "dp+cp")."""

    kind: str
    local: float
    wide: float
    label: str


@dataclass(frozen=True, slots=True)
class Send:
    """A message of `seconds` when alone, to the stage `step` away."""

    step: int
    tag: int
    seconds: float
    label: str


@dataclass(frozen=True, slots=True)
class Take:
    """A message from the stage `step` away."""

    step: int
    tag: int
    label: str


Op = Work | Meet | Send | Take
Program = Sequence[Op]

WORK, WAIT, TRANSFER = "work", "wait", "transfer"


@dataclass(frozen=True, slots=True)
class Stay:
    """What a class does from `start` to `stop`: work, wait for others, or take part in a transfer."""

    label: str
    kind: str
    start: float
    stop: float


@dataclass(slots=True)
class Outcome:
    """When each class was done (inf: never), its seconds by (kind, label), its stays where they were kept, and what a
    class that was never done stood at.
    """

    stop: list[float]
    spent: list[dict[tuple[str, str], float]]
    stays: list[list[Stay]]
    stuck: dict[int, str] = field(default_factory=dict)

    @property
    def length(self) -> float:
        """Until the last one is done."""
        return max(self.stop)


@dataclass(slots=True)
class _Flow:
    """A transfer under way: seconds left at full speed, its speed, since when, and the links that it shares."""

    left: float
    links: tuple[Hashable, ...]
    done: Callable[[float], None]
    rate: float = 1.0
    since: float = 0.0
    version: int = 0


class Links:
    """What the links of nodes carry, and how fast. `load[link][kind]`: lanes that all transfers of a kind ask for."""

    def __init__(self, capacity: int, load: Mapping[Hashable, Mapping[Hashable, float]]) -> None:
        self.capacity, self.load = capacity, load
        self.active: dict[Hashable, dict[int, tuple[_Flow, Hashable]]] = {}

    def add(self, number: int, flow: _Flow, kind: Hashable) -> set[int]:
        """A transfer starts: the numbers of all whose speed may change."""
        for link in flow.links:
            self.active.setdefault(link, {})[number] = (flow, kind)
        return {other for link in flow.links for other in self.active[link]}

    def remove(self, number: int, flow: _Flow) -> set[int]:
        """A transfer ends."""
        for link in flow.links:
            del self.active[link][number]
        return {other for link in flow.links for other in self.active[link]}

    def rate(self, flow: _Flow) -> float:
        """Of a transfer, by the fullest of its links."""
        return min([1.0, *(self._share(link) for link in flow.links)])

    def _share(self, link: Hashable) -> float:
        asked = sum(self.load[link][kind] for _, kind in self.active[link].values())
        return self.capacity / asked if asked > self.capacity else 1.0


class Simulation:
    """Runs the programs of all classes. `dies`: the moment at which the ranks of a class die."""

    def __init__(
        self,
        places: Places,
        classes: Classes,
        groups: Mapping[str, Sequence[str]],
        capacity: int,
        *,
        keeps_stays: bool = False,
    ) -> None:
        self.classes, self.keeps_stays = classes, keeps_stays
        self.topology = Topology(places, classes, groups, capacity)
        self.links = Links(capacity, self.topology.load)
        self.queue: list[tuple[float, int, Callable[[float], None]]] = []
        self.flows: dict[int, _Flow] = {}
        self.number = 0

    def run(self, programs: Sequence[Program], dies: Mapping[int, float] | None = None) -> Outcome:
        """Until nothing moves any more; `programs`: of each class."""
        count = len(self.classes.first)
        self.programs, self.dies = programs, dies or {}
        self.place, self.met = [0] * count, [dict[str, int]() for _ in range(count)]
        self.arrived: dict[tuple[Hashable, int], dict[int, float]] = {}
        self.came: dict[tuple[int, int, int], float] = {}
        self.awaited: dict[tuple[int, int, int], tuple[int, float, str]] = {}
        self.outcome = Outcome([math.inf] * count, [{} for _ in range(count)], [[] for _ in range(count)])
        for each in range(count):
            self._go_on(each, 0.0)
        while self.queue:
            now, _, call = heapq.heappop(self.queue)
            call(now)
        for each in range(count):
            if math.isinf(self.outcome.stop[each]) and self.place[each] < len(programs[each]):
                self.outcome.stuck[each] = programs[each][self.place[each]].label
        return self.outcome

    def _at(self, moment: float, call: Callable[[float], None]) -> None:
        self.number += 1
        heapq.heappush(self.queue, (moment, self.number, call))

    def _go_on(self, each: int, now: float) -> None:
        """Do the next operations of a class, until one takes time."""
        program, end = self.programs[each], self.dies.get(each, math.inf)
        while now < end:
            if self.place[each] == len(program):
                self.outcome.stop[each] = now
                return
            op = program[self.place[each]]
            if isinstance(op, Send):
                self._send(each, op, now)
                self.place[each] += 1
            elif isinstance(op, Work):
                stop = now + op.seconds
                self._note(each, op.label, WORK, now, min(stop, end))
                if stop > end:
                    return
                self.place[each] += 1
                self._at(stop, lambda moment: self._go_on(each, moment))
                return
            elif isinstance(op, Take):
                key = (each, op.step, op.tag)
                if key not in self.came:
                    self.awaited[key] = (each, now, op.label)
                    return
                del self.came[key]
                self.place[each] += 1
            else:
                self._meet(each, op, now)
                return

    def _note(self, each: int, label: str, kind: str, start: float, stop: float) -> None:
        if stop <= start:
            return
        spent = self.outcome.spent[each]
        spent[kind, label] = spent.get((kind, label), 0.0) + stop - start
        if self.keeps_stays:
            self.outcome.stays[each].append(Stay(label, kind, start, stop))

    def _meet(self, each: int, op: Meet, now: float) -> None:
        group = self.topology.group_of[op.kind][each]
        members = self.topology.members[op.kind][group]
        number = self.met[each].get(op.kind, 0)
        self.met[each][op.kind] = number + 1
        here = self.arrived.setdefault((f"{op.kind} {group}", number), {})
        here[each] = now
        if len(here) == len(members):
            del self.arrived[f"{op.kind} {group}", number]
            for member, came in here.items():
                self._note(member, op.label, WAIT, came, now)
            key = (op.kind, group)
            self._at(
                now + op.local,
                lambda moment: self._start(op.wide, key, moment, lambda end: self._met(here, op, now, end)),
            )

    def _met(self, here: Mapping[int, float], op: Meet, start: float, now: float) -> None:
        for member in here:
            self._note(member, op.label, TRANSFER, start, now)
            self.place[member] += 1
        for member in here:
            self._go_on(member, now)

    def _send(self, each: int, op: Send, now: float) -> None:
        target = self.topology.neighbour[op.step][each]
        key = (target, -op.step, op.tag)
        self._start(op.seconds, ("message", each, op.step), now, lambda moment: self._delivered(key, moment))

    def _delivered(self, key: tuple[int, int, int], now: float) -> None:
        if key not in self.awaited:
            self.came[key] = now
            return
        each, since, label = self.awaited.pop(key)
        self._note(each, label, WAIT, since, now)
        self.place[each] += 1
        self._go_on(each, now)

    def _start(self, seconds: float, kind: Hashable, now: float, done: Callable[[float], None]) -> None:
        """A transfer; where it leaves no node it takes its time whatever else goes on."""
        links = self.topology.links.get(kind, ())
        if not links or seconds <= 0:
            self._at(now + seconds, done)
            return
        self.number += 1
        number, flow = self.number, _Flow(seconds, links, done, since=now)
        self.flows[number] = flow
        self._change(self.links.add(number, flow, kind), now)

    def _change(self, numbers: set[int], now: float) -> None:
        for number in sorted(numbers):
            flow = self.flows[number]
            rate = self.links.rate(flow)
            if flow.version and rate == flow.rate:
                continue
            flow.left -= (now - flow.since) * flow.rate if flow.version else 0.0
            flow.rate, flow.since, flow.version = rate, now, flow.version + 1
            version = flow.version
            self._at(now + max(flow.left, 0.0) / rate, lambda end, n=number, v=version: self._ended(n, v, end))  # type: ignore[misc]

    def _ended(self, number: int, version: int, now: float) -> None:
        flow = self.flows.get(number)
        if flow is None or flow.version != version:
            return
        del self.flows[number]
        self._change(self.links.remove(number, flow), now)
        flow.done(now)


class Topology:
    """Groups, neighbours and links of classes, from one rank, group or node of each.

    A group asks for a lane for each of its ranks on a node, as far as there are so many.
    """

    def __init__(self, places: Places, classes: Classes, groups: Mapping[str, Sequence[str]], capacity: int) -> None:
        self.places, self.classes, self.capacity = places, classes, capacity
        self.group_of: dict[str, list[int]] = {}
        self.members: dict[str, list[set[int]]] = {}
        self.links: dict[Hashable, tuple[Hashable, ...]] = {}
        self.load: dict[Hashable, dict[Hashable, float]] = {}
        self.neighbour = {
            step: [classes.of[places.neighbour(rank, step)] for rank in classes.first] for step in (-1, 1)
        }
        nodes = self._node_classes()
        for kind, axes in groups.items():
            self._add_groups(kind, axes, nodes)
        for step in (-1, 1):
            self._add_messages(step, nodes)

    def _node_classes(self) -> dict[int, int]:
        """The class of each node: the first node with the same classes of ranks on it."""
        places, found, nodes = self.places, dict[Hashable, int](), {}
        for first in range(0, places.ranks, places.per_node):
            node = places.node(first)
            key = tuple(sorted(self.classes.of[first : first + places.per_node]))
            nodes[node] = found.setdefault(key, node)
        return nodes

    def _add_groups(self, kind: str, axes: Sequence[str], nodes: Mapping[int, int]) -> None:
        """A class of groups has the classes of its members; its lanes are counted on one node of each class."""
        places, of = self.places, self.classes.of
        numbers: dict[Hashable, int] = {}
        self.group_of[kind], self.members[kind] = [0] * len(self.classes.first), []
        seen: set[int] = set()
        for rank in range(places.ranks):
            if rank in seen:
                continue
            members = places.group(rank, axes)
            seen.update(members)
            key = frozenset(of[member] for member in members)
            if key not in numbers:
                numbers[key] = len(numbers)
                self.members[kind].append(set(key))
            number = numbers[key]
            for each in key:
                self.group_of[kind][each] = number
            self._add_links((kind, number), members, nodes)

    def _add_links(self, kind: Hashable, members: Sequence[int], nodes: Mapping[int, int]) -> None:
        on_node: dict[int, int] = {}
        for member in members:
            node = self.places.node(member)
            on_node[node] = on_node.get(node, 0) + 1
        if len(on_node) == 1:
            return
        links = tuple((nodes[node], way) for node in on_node for way in ("out", "in"))
        self.links.setdefault(kind, tuple(dict.fromkeys(links)))
        for node, lanes in on_node.items():
            self._ask(node, nodes, kind, min(lanes, self.capacity), ("out", "in"))

    def _add_messages(self, step: int, nodes: Mapping[int, int]) -> None:
        places, of = self.places, self.classes.of
        for rank in range(places.ranks):
            other = places.neighbour(rank, step)
            here, there = places.node(rank), places.node(other)
            if here == there:
                continue
            kind = ("message", of[rank], step)
            self.links.setdefault(kind, ((nodes[here], "out"), (nodes[there], "in")))
            self._ask(here, nodes, kind, 1, ("out",))
            self._ask(there, nodes, kind, 1, ("in",))

    def _ask(self, node: int, nodes: Mapping[int, int], kind: Hashable, lanes: int, ways: Sequence[str]) -> None:
        """Lanes on the links of a node, where that stands for its class."""
        if nodes[node] == node:
            for way in ways:
                load = self.load.setdefault((node, way), {})
                load[kind] = load.get(kind, 0.0) + lanes
