"""One rank by itself: every collective is the identity and costs nothing. Needs no MPI."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

from mpitp.backend.arrays import Array
from mpitp.comm.group import Group
from mpitp.comm.reductions import check_op, cut, sum_in_order


class SerialGroup(Group):
    """The one-rank group. Results are the arguments themselves."""

    def __init__(self) -> None:
        self.rank = 0
        self.size = 1
        self._letters: defaultdict[int, deque[Array]] = defaultdict(deque)  # sent to oneself, by tag

    def all_reduce(self, x: Array, op: str = "sum", out: Array | None = None) -> Array:
        check_op(op)
        if out is None or out is x:
            return x
        out[...] = x
        return out

    def all_reduce_in_order(self, partials: Sequence[Array], like: Array) -> Array:
        return sum_in_order(partials, like)

    def all_gather(self, x: Array, dim: int = 0) -> Array:
        return x

    def reduce_scatter(self, x: Array, sizes: Sequence[int], dim: int = 0) -> Array:
        cut(x, sizes, dim)
        return x

    def all_to_all(self, blocks: Sequence[Array]) -> list[Array]:
        (block,) = blocks
        return [block]

    def broadcast(self, x: Array, root: int = 0) -> Array:
        return x

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        return value

    def all_gather_objects(self, value: Any) -> list[Any]:
        return [value]

    def send(self, x: Array, dest: int, tag: int = 0) -> None:
        assert dest == 0, f"a one-rank group has no rank {dest}"
        self._letters[tag].append(x.copy())

    def recv(self, like: Array, source: int, tag: int = 0) -> Array:
        assert source == 0, f"a one-rank group has no rank {source}"
        if not self._letters[tag]:
            raise RuntimeError(f"recv with tag {tag} would wait for ever: this only rank has sent itself nothing")
        return self._letters[tag].popleft()

    def barrier(self) -> None:
        pass

    def split(self, color: int, key: int) -> Group:
        return SerialGroup()
