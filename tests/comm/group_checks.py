"""What every kind of group must do: one body, run on serial, thread and MPI groups, with host and device arrays.

Each check is a function of (group, xp) that all ranks call; values are small whole numbers, exact in every dtype,
unless rounding is what the check is about.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import md5
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mpitp.backend.arrays import array_module, from_host, to_host
from mpitp.comm.group import Group
from mpitp.errors import UsageError
from mpitp.layers.partition import split_evenly

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(name) for name in ("f4", "f8", "f2", "i4", "i8")] + [BF16]
SHAPES = [(7,), (8, 3), (3, 9), (2, 3, 4), (1, 1), (0,), (2, 0, 3)]

Check = Callable[[Group, Any], None]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__.removeprefix("check_")] = function
    return function


def values(rank: int, shape: tuple[int, ...], dtype: Any = "f4") -> np.ndarray:
    """Rank's host array: whole numbers below 20."""
    count = int(np.prod(shape))
    return ((np.arange(count) * 7 + rank * 3) % 11 + rank).reshape(shape).astype(dtype)


def layouts(host: np.ndarray, xp: Any) -> list[Any]:
    """The same values as C-ordered, F-ordered and strided arrays of module xp."""
    doubled = from_host(np.repeat(host, 2, axis=-1), xp)
    turned = from_host(np.array(host.T, order="C"), xp).T
    return [from_host(host.copy(), xp), turned, doubled[..., ::2]]


def assert_same(got: Any, expected: np.ndarray, xp: Any) -> None:
    """Equal to the bit, in shape and dtype, and an array of the module it should be of."""
    assert array_module(got) is xp
    host = to_host(got)
    assert (host.shape, host.dtype) == (expected.shape, expected.dtype)
    assert host.tobytes() == np.ascontiguousarray(expected).tobytes(), f"got\n{host}\nexpected\n{expected}"


@check
def check_all_reduce(group: Group, xp: Any) -> None:
    combine = {"sum": np.add, "max": np.maximum, "min": np.minimum}
    for dtype in DTYPES:
        for shape in SHAPES:
            for op, function in combine.items():
                everyone = [values(rank, shape, "f8") for rank in range(group.size)]
                expected = function.reduce(everyone).astype(dtype)
                for x in layouts(values(group.rank, shape, dtype), xp):
                    assert_same(group.all_reduce(x, op), expected, xp)
                    assert_same(group.start_all_reduce(x, op).wait(), expected, xp)
                    assert_same(x, values(group.rank, shape, dtype), xp)


@check
def check_all_reduce_out(group: Group, xp: Any) -> None:
    for dtype in DTYPES:
        for shape in SHAPES:
            expected = sum(values(rank, shape, "f8") for rank in range(group.size)).astype(dtype)
            for x in layouts(values(group.rank, shape, dtype), xp):
                out = xp.zeros(shape, dtype)
                assert group.all_reduce(x, out=out) is out
                assert_same(out, expected, xp)
                assert_same(x, values(group.rank, shape, dtype), xp)
                assert group.start_all_reduce(x, out=x).wait() is x
                assert_same(x, expected, xp)


@check
def check_all_reduce_keeps_numpy_scalars_shape(group: Group, xp: Any) -> None:
    x = from_host(np.array(group.rank + 1.0), xp)
    assert_same(group.all_reduce(x), np.array(group.size * (group.size + 1) / 2), xp)


@check
def check_16_bit_sums_are_rounded_once(group: Group, xp: Any) -> None:
    for dtype, big in ((BF16, 256), (np.dtype("f2"), 2048)):
        exact = np.float32(big + group.size - 1)
        own = np.array([big if group.rank == 0 else 1], dtype)
        for result in (
            group.all_reduce(from_host(own, xp)),
            group.reduce_scatter(from_host(np.repeat(own, group.size), xp), [1] * group.size),
            group.all_reduce_in_order([from_host(own, xp)], from_host(own, xp)),
        ):
            assert_same(result, exact.astype(dtype).reshape(1), xp)


@check
def check_results_are_equal_on_all_ranks(group: Group, xp: Any) -> None:
    x = np.random.default_rng(group.rank).standard_normal(101).astype("f4")
    for result in (group.all_reduce(from_host(x, xp)), group.all_reduce_in_order([from_host(x, xp)], from_host(x, xp))):
        assert len(set(group.all_gather_objects(md5(to_host(result).tobytes()).digest()))) == 1


@check
def check_all_reduce_in_order(group: Group, xp: Any) -> None:
    """However the partials are dealt, the sum is ((0 + p0) + p1) + ... to the bit."""
    for count in (0, 1, 5, 12):
        rng = np.random.default_rng(count)
        partials = [(rng.standard_normal((7, 9)) * 10.0 ** rng.integers(-6, 6)).astype("f4") for _ in range(count)]
        expected = np.zeros((7, 9), "f4")
        for partial in partials:
            expected = expected + partial
        for deal in (split_evenly(count, group.size), all_on_last(count, group.size)):
            own = [from_host(partials[i], xp) for i in deal[group.rank]]
            assert_same(group.all_reduce_in_order(own, xp.zeros((7, 9), "f4")), expected, xp)


def all_on_last(count: int, ranks: int) -> list[range]:
    return [range(0)] * (ranks - 1) + [range(count)]


@check
def check_all_reduce_in_order_shapes(group: Group, xp: Any) -> None:
    for shape in SHAPES:
        for dtype in DTYPES:
            expected = sum(values(rank, shape, "f8") for rank in range(group.size)).astype(dtype)
            for x in layouts(values(group.rank, shape, dtype), xp):
                result = group.all_reduce_in_order([x], x)
                assert result is not x
                assert_same(result, expected, xp)


@check
def check_all_reduce_in_order_adds_to_positive_zero(group: Group, xp: Any) -> None:
    x = from_host(np.full(3, -0.0), xp)
    assert_same(group.all_reduce_in_order([x], x), np.zeros(3), xp)


def ragged(rank: int, dim: int) -> tuple[int, ...]:
    """A shape whose length along `dim` depends on the rank, and is zero on some."""
    shape = [2, 3, 4]
    shape[dim] = (rank * 2 + 1) % 4 if rank != 1 else 0
    return tuple(shape)


@check
def check_all_gather(group: Group, xp: Any) -> None:
    for dtype in [*DTYPES, np.dtype("?"), np.dtype("c16")]:
        for dim in (0, 1, 2, -1):
            pieces = [values(rank, ragged(rank, dim), dtype) for rank in range(group.size)]
            expected = np.concatenate(pieces, axis=dim)
            for x in layouts(pieces[group.rank], xp):
                assert_same(group.all_gather(x, dim), expected, xp)
                assert_same(group.start_all_gather(x, dim).wait(), expected, xp)


@check
def check_all_gather_of_nothing(group: Group, xp: Any) -> None:
    assert_same(group.all_gather(xp.zeros((0, 3), "f4")), np.zeros((0, 3), "f4"), xp)


@check
def check_all_gather_refuses_misfits_on_every_rank(group: Group, xp: Any) -> None:
    if group.size > 1:
        with pytest.raises(RuntimeError, match="fit|different"):
            group.all_gather(xp.zeros((2, 3 + group.rank), "f4"))


@check
def check_reduce_scatter(group: Group, xp: Any) -> None:
    for dtype in DTYPES:
        for sizes in ([rank % 3 for rank in range(group.size)], [5] + [0] * (group.size - 1), [2] * group.size):
            start = sum(sizes[: group.rank])
            own = range(start, start + sizes[group.rank])
            for dim in (0, 1, -1):
                shape = [3, 3, 3]
                shape[dim] = sum(sizes)
                total = sum(values(rank, tuple(shape), "f8") for rank in range(group.size)).astype(dtype)
                for x in layouts(values(group.rank, tuple(shape), dtype), xp):
                    expected = np.take(total, own, dim)
                    assert_same(group.reduce_scatter(x, sizes, dim), expected, xp)
                    assert_same(group.start_reduce_scatter(x, sizes, dim).wait(), expected, xp)


@check
def check_reduce_scatter_refuses_sizes_that_do_not_add_up(group: Group, xp: Any) -> None:
    with pytest.raises(UsageError, match="add up"):
        group.reduce_scatter(xp.zeros((5, 2), "f4"), [9] * group.size)


@check
def check_gather_undoes_scatter(group: Group, xp: Any) -> None:
    for rows in (7, 8, 9):
        sizes = [len(part) for part in split_evenly(rows, group.size)]
        x = values(group.rank, (rows, 4))
        expected = sum(values(rank, (rows, 4)) for rank in range(group.size))
        assert_same(group.all_gather(group.reduce_scatter(from_host(x, xp), sizes)), expected, xp)


@check
def check_all_to_all(group: Group, xp: Any) -> None:
    for dtype in DTYPES:

        def block(source: int, dest: int, dtype: Any = dtype) -> np.ndarray:
            return values(source, (dest, source + 2), dtype) + np.array(dest, dtype)

        received = group.all_to_all([from_host(block(group.rank, dest), xp) for dest in range(group.size)])
        assert len(received) == group.size
        for source, got in enumerate(received):
            assert_same(got, block(source, group.rank), xp)


@check
def check_started_all_to_all(group: Group, xp: Any) -> None:
    """Two under way at once, a blocking one between them; lengths said before, some of them 0."""

    def block(source: int, dest: int, number: int) -> np.ndarray:
        return values(source + number, (3 * number * ((source + dest) % 3), 2))

    def blocks(number: int) -> list[Any]:
        return [from_host(block(group.rank, dest, number), xp) for dest in range(group.size)]

    lengths = [len(block(source, group.rank, 1)) for source in range(group.size)]
    first, second = group.start_all_to_all(blocks(1), lengths), group.start_all_to_all(blocks(2))
    between = group.all_to_all(blocks(3))
    for number, received in ((2, second.wait()), (1, first.wait()), (3, between)):
        for source, got in enumerate(received):
            assert_same(got, block(source, group.rank, number), xp)


@check
def check_broadcast(group: Group, xp: Any) -> None:
    for dtype in DTYPES:
        for root in range(group.size):
            for shape in SHAPES:
                for x in layouts(values(group.rank, shape, dtype), xp):
                    assert_same(group.broadcast(x, root), values(root, shape, dtype), xp)
                    assert_same(x, values(group.rank, shape, dtype), xp)


@check
def check_objects(group: Group, xp: Any) -> None:
    own = {"rank": group.rank, "text": "é" * (group.rank * 20)}
    everyone = [{"rank": rank, "text": "é" * (rank * 20)} for rank in range(group.size)]
    assert group.all_gather_objects(own) == everyone
    for root in range(group.size):
        assert group.broadcast_object(own if group.rank == root else None, root) == everyone[root]


@check
def check_send_and_recv(group: Group, xp: Any) -> None:
    """A letter goes round the ring and collects every rank's number."""
    if group.size == 1:
        return
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    for dtype in DTYPES:
        for x in layouts(values(group.rank, (3, 5), dtype), xp):
            if group.rank == 0:
                group.send(x, after, tag=3)
            assert_same(group.recv(xp.zeros((3, 5), dtype), before, tag=3), values(before, (3, 5), dtype), xp)
            if group.rank != 0:
                group.send(x, after, tag=3)
    group.barrier()


@check
def check_several_under_way(group: Group, xp: Any) -> None:
    xs = [from_host(values(group.rank, (n, 3)), xp) for n in (7, 8, 9)]
    pending = [group.start_all_reduce(x) for x in xs] + [group.start_all_gather(xs[0])]
    results = [each.wait() for each in reversed(pending)][::-1]
    for n, got in zip((7, 8, 9), results, strict=False):
        assert_same(got, sum(values(rank, (n, 3)) for rank in range(group.size)), xp)
    assert_same(results[3], np.concatenate([values(rank, (7, 3)) for rank in range(group.size)]), xp)
    assert pending[0].wait() is results[0]


@check
def check_messages_under_way(group: Group, xp: Any) -> None:
    """Every rank starts all sends and receives before it waits, and waits in another order than others send in."""
    if group.size == 1:
        return
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    shapes = {tag: (tag + 1, 5) for tag in range(4)}
    received = {tag: group.start_recv(xp.zeros(shapes[tag], "f4"), before, tag) for tag in shapes}
    sent = [group.start_send(from_host(values(group.rank, shapes[tag]), xp), after, tag) for tag in reversed(shapes)]
    for tag in (2, 0, 3, 1):
        assert_same(received[tag].wait(), values(before, shapes[tag]), xp)
        assert received[tag].test()
    for pending in sent:
        pending.wait()
    group.barrier()


@check
def check_split(group: Group, xp: Any) -> None:
    part = group.split(group.rank % 2, -group.rank)
    members = sorted((rank for rank in range(group.size) if rank % 2 == group.rank % 2), reverse=True)
    assert (part.size, part.rank) == (len(members), members.index(group.rank))
    assert part.all_gather_objects(group.rank) == members
    x = from_host(values(group.rank, (7,)), xp)
    assert_same(part.all_reduce(x), sum(values(rank, (7,)) for rank in members), xp)
    alone = part.split(part.rank, 0)
    assert (alone.size, alone.rank) == (1, 0)
    assert group.all_gather_objects(part.size) == [(group.size + 1 - rank % 2) // 2 for rank in range(group.size)]


@check
def check_unknown_reduction(group: Group, xp: Any) -> None:
    with pytest.raises(UsageError, match="unknown reduction 'mean'"):
        group.all_reduce(xp.zeros(3, "f4"), "mean")
