"""Work orders: what all ranks get in a step, and what they refuse."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mpitp.comm import Group, run_threads
from mpitp.infer.orders import HEAD, Next, OrderChannel, Reason, TextRun, WorkOrder, decoded, encoded

RUN = TextRun(3, 2, (7, 8, 9), ((16, 20), (0, 2)), 2)
ORDER = WorkOrder(5, (RUN, replace(RUN, text=4, wanted=0)), ((0, 16, 3),), ((3, 7, Reason.EOS),))


def test_there_and_back() -> None:
    assert decoded(encoded(ORDER), 20) == ORDER
    assert decoded(encoded(WorkOrder(1, next=Next.END)), 0) == WorkOrder(1, next=Next.END)


@pytest.mark.parametrize(
    "wrong",
    [
        encoded(ORDER)[:-1],
        np.append(encoded(ORDER), 1),
        encoded(replace(ORDER, model=2)),
        encoded(replace(ORDER, runs=(replace(RUN, wanted=4),))),
        encoded(replace(ORDER, runs=(replace(RUN, wanted=-1),))),
        encoded(replace(ORDER, copies=((0, 18, 3),))),
        encoded(replace(ORDER, copies=((-1, 0, 1),))),
        encoded(replace(ORDER, runs=(replace(RUN, first=4),))),
        encoded(replace(ORDER, runs=(replace(RUN, first=-1),))),
        encoded(replace(ORDER, runs=(replace(RUN, tokens=()),))),
        encoded(replace(ORDER, runs=(replace(RUN, table=((16, 21),)),))),
        encoded(replace(ORDER, runs=(replace(RUN, table=((6, 6), (0, 9))),))),
    ],
)
def test_wrong_orders_are_refused(wrong: np.ndarray) -> None:
    with pytest.raises(ValueError, match="work order"):
        decoded(wrong, 20)


@pytest.mark.parametrize("ranks", [1, 3])
def test_all_ranks_get_them_short_or_long_and_sleep_between(ranks: int) -> None:
    long = WorkOrder(3, (TextRun(1, 0, tuple(range(2 * HEAD)), ((0, 2 * HEAD),), 1),))
    orders = [WorkOrder(1), WorkOrder(2, next=Next.SLEEP), long, WorkOrder(4, next=Next.END)]

    def run(group: Group) -> list[WorkOrder]:
        channel = OrderChannel(group, 2 * HEAD)
        if group.rank:
            return [channel.receive() for _ in orders]
        for order in orders:
            channel.send(order)
        return orders

    assert run_threads(ranks, run) == [orders] * ranks


def test_a_missed_order_is_found_out() -> None:
    def run(group: Group) -> None:
        channel = OrderChannel(group, 1)
        if group.rank:
            with pytest.raises(ValueError, match="work order 2 came where number 1 was due"):
                channel.receive()
        else:
            channel.send(WorkOrder(2))

    run_threads(2, run)
