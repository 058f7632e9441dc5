"""Every way in which ranks can disagree on a collective is an error on all of them that names both call sites."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpitp.comm import Group, run_threads
from mpitp.comm.checked import checked
from mpitp.errors import LaunchError

Body = Callable[[Group, bool], Any]


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


MISMATCHES: dict[str, tuple[Body, str, str]] = {  # body(group, whether this rank is the odd one), what each calls
    "shape": (lambda g, odd: g.all_reduce(ones(3, 4 + odd)), "all_reduce(sum) [3, 4]", "all_reduce(sum) [3, 5]"),
    "number of dims": (lambda g, odd: g.all_reduce(ones(3, 4) if odd else ones(12)), "[12] float32", "[3, 4] float32"),
    "dtype": (
        lambda g, odd: g.all_reduce(ones(3, dtype=np.float64 if odd else np.float32)),
        "[3] float32",
        "[3] float64",
    ),
    "reduction": (lambda g, odd: g.all_reduce(ones(3), "max" if odd else "sum"), "all_reduce(sum)", "all_reduce(max)"),
    "operation": (lambda g, odd: g.barrier() if odd else g.all_reduce(ones(3)), "all_reduce(sum) [3]", "barrier []"),
    "root": (lambda g, odd: g.broadcast(ones(3), root=int(odd)), "broadcast(root 0)", "broadcast(root 1)"),
    "dim": (lambda g, odd: g.all_gather(ones(3, 3), dim=int(odd)), "all_gather(dim 0)", "all_gather(dim 1)"),
    "dims that must be equal": (lambda g, odd: g.all_gather(ones(3, 3 + odd)), "[3, 3] float32", "[3, 4] float32"),
    "sizes": (
        lambda g, odd: g.reduce_scatter(ones(6), [2, 2, 2] if odd else [1, 2, 3]),
        "sizes [1, 2, 3]",
        "sizes [2, 2, 2]",
    ),
    "dtype of blocks": (
        lambda g, odd: g.all_to_all([ones(2, dtype=np.int64 if odd else np.int32)] * 3),
        "all_to_all [3] int32",
        "all_to_all [3] int64",
    ),
    "started or not": (
        lambda g, odd: g.all_reduce(ones(3)) if odd else g.start_all_reduce(ones(3)).wait(),
        "start all_reduce(sum) [3]",
        "all_reduce(sum) [3]",
    ),
}


@pytest.mark.parametrize("mismatch", MISMATCHES)
def test_mismatch_is_an_error_with_both_sites(mismatch: str) -> None:
    body, regular, odd = MISMATCHES[mismatch]

    def rank(group: Group) -> str:
        group_checked = checked(group)
        group_checked.barrier()
        with pytest.raises(LaunchError) as caught:
            body(group_checked, group.rank == 2)
        return str(caught.value)

    messages = run_threads(3, rank, timeout=20)
    assert len(set(messages)) == 1
    first, of_0, of_2 = messages[0].splitlines()
    assert first == "collective 2 differs between ranks:"
    host = socket.gethostname()
    place = r"comm/test_checked.py:\d+ in .* < comm/test_checked.py:\d+ in rank"
    assert re.fullmatch(rf"  rank 0 on {host} calls .*{re.escape(regular)}.* at {place}.*", of_0)
    assert re.fullmatch(rf"  rank 2 on {host} calls .*{re.escape(odd)}.* at {place}.*", of_2)


def test_a_skipped_call_is_found_at_the_next_one() -> None:
    def rank(group: Group) -> str:
        group_checked = checked(group)
        with pytest.raises(LaunchError) as caught:
            if group.rank != 1:
                group_checked.all_reduce(ones(3))
            group_checked.all_reduce(ones(3))
            group_checked.all_reduce(ones(3))
        return str(caught.value)

    messages = run_threads(3, rank, timeout=20)
    assert len(set(messages)) == 1
    lines = [int(number) for number in re.findall(r"test_checked.py:(\d+) in rank", messages[0])]
    assert "collective 1 differs" in messages[0] and lines[1] == lines[0] + 1


def test_another_order_is_found() -> None:
    def rank(group: Group) -> str:
        group_checked = checked(group)
        with pytest.raises(LaunchError) as caught:
            for name in ("all_reduce", "all_gather") if group.rank else ("all_gather", "all_reduce"):
                getattr(group_checked, name)(ones(3))
        return str(caught.value)

    (message,) = set(run_threads(2, rank, timeout=20))
    assert "rank 0" in message and "calls all_gather(dim 0)" in message and "calls all_reduce(sum)" in message


def test_what_may_differ_is_let_through() -> None:
    def rank(group: Group) -> None:
        group_checked = checked(group)
        rank = group.rank
        assert group_checked.all_gather(ones(rank + 1, 2)).shape == (6, 2)
        assert group_checked.all_gather(ones(2, rank), dim=-1).shape == (2, 3)
        assert [len(block) for block in group_checked.all_to_all([ones(rank)] * 3)] == [0, 1, 2]
        assert group_checked.all_reduce_in_order([ones(2)] * rank, ones(2)).tolist() == [3, 3]
        assert group_checked.all_gather_objects(rank) == [0, 1, 2]
        assert group_checked.broadcast_object(rank, root=1) == 1
        if rank == 0:
            group_checked.send(ones(2), 2)
        if rank == 2:
            group_checked.recv(ones(2), 0)
        part = group_checked.split(rank % 2, rank)
        assert part.all_reduce(ones(1))[0] == part.size == (1 if rank == 1 else 2)

    run_threads(3, rank, timeout=20)


def test_parts_of_a_split_group_are_checked_too() -> None:
    def rank(group: Group) -> None:
        part = checked(group).split(group.rank // 2, group.rank)
        if group.rank < 2:
            part.all_reduce(ones(2))
            return
        with pytest.raises(LaunchError, match="collective 1 differs"):
            part.all_reduce(ones(group.rank))

    run_threads(4, rank, timeout=20)
