"""17  A mixture of experts: a router sends each token to a few of many MLPs, an all-to-all takes it there and back.

    l = x Wr^T      chosen, s = the K largest of softmax(l)           x [t, h], Wr [e, h]
    y = sum over chosen experts of  s_e relu(x A_e^T) B_e^T           a token meets K experts, whatever their number

Experts are dealt to the ranks, and each rank has tokens of its own. How many rows go from whom to whom depends on the
data, and still all ranks make the same calls: first counts, then rows, sorted by expert; a rank that nobody chose gets
empty blocks. There with x and back with y; in backward there with dy and back with dx, the same permutation of rows.
"""

import numpy as np
from course import Watched, exercise, on_ranks, prove, say, say_each

from mpitp.comm import Group, SerialGroup
from mpitp.layers.partition import split_evenly

RANKS = 3
EXPERTS, CHOSEN, TOKENS, HIDDEN, INNER = 7, 2, 30, 4, 6
SHAPES = (EXPERTS, HIDDEN), (EXPERTS, INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)  # the router, A and B, whole


def route(x: np.ndarray, router: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """chosen [t, K] and scores [t, K]."""
    e = np.exp(x @ router.T)
    p = e / e.sum(axis=1, keepdims=True)
    chosen = np.argsort(-p, axis=1, kind="stable")[:, :CHOSEN]
    return chosen, np.take_along_axis(p, chosen, axis=1)


class Trip:
    """Where this rank's rows, sorted by expert, go: `there`, and `back` again."""

    def __init__(self, group: Group, counts: np.ndarray) -> None:
        experts = split_evenly(EXPERTS, group.size)
        blocks = [counts[own.start : own.stop] for own in experts]
        arrived = np.stack(group.all_to_all(blocks))  # [p, own experts]: who sends how many rows for which of them
        self.group, self.sent, self.arrived = group, [int(b.sum()) for b in blocks], arrived.sum(axis=1).tolist()
        self.own, self.counts = experts[group.rank], arrived.sum(axis=0)
        experts_of_rows = [np.repeat(np.arange(len(self.own)), each) for each in arrived]
        self.by_expert = np.argsort(np.concatenate(experts_of_rows), kind="stable")

    def there(self, rows: np.ndarray) -> np.ndarray:
        return self.move(rows, self.sent)[self.by_expert]

    def back(self, rows: np.ndarray) -> np.ndarray:
        return self.move(rows[np.argsort(self.by_expert)], self.arrived)

    def move(self, rows: np.ndarray, sizes: list[int]) -> np.ndarray:
        """The next `sizes[r]` rows to rank r, for every r; what came, rank after rank."""
        return np.concatenate(self.group.all_to_all(np.split(rows, np.cumsum(sizes)[:-1])))


def mixture(group: Group, x: np.ndarray, dy: np.ndarray):
    """y and dx (through the experts, the scores held) of own tokens, dA of own experts, and the trip."""
    router, a, b = (np.random.default_rng(17).standard_normal(shape) for shape in SHAPES)
    chosen, scores = route(x, router)
    order = np.argsort(chosen.reshape(-1), kind="stable")  # rows sorted by expert; a token has CHOSEN of them
    token, score = order // CHOSEN, scores.reshape(-1)[order, None]
    trip = Trip(group, np.bincount(chosen.reshape(-1), minlength=EXPERTS))
    rows, drows = trip.there(x[token]), trip.there(score * dy[token])
    (out, dx_rows), da = np.empty((2, *rows.shape)), np.zeros((len(trip.own), INNER, HIDDEN))
    bounds = np.cumsum([0, *trip.counts])  # of each own expert's rows; it may have none
    for i, e in enumerate(trip.own):
        at = slice(bounds[i], bounds[i + 1])
        inner = rows[at] @ a[e].T
        out[at] = np.maximum(inner, 0) @ b[e].T
        dinner = (drows[at] @ b[e]) * (inner > 0)
        dx_rows[at], da[i] = dinner @ a[e], dinner.T @ rows[at]
    y, dx = np.zeros((2, *x.shape))
    np.add.at(y, token, score * trip.back(out))
    np.add.at(dx, token, trip.back(dx_rows))
    return y, dx, da, trip


def main(group: Group) -> None:
    x, dy = np.random.default_rng(1).standard_normal((2, TOKENS, HIDDEN))
    whole_y, whole_dx, whole_da, _ = mixture(SerialGroup(), x, dy)
    mine = slice(TOKENS * group.rank // group.size, TOKENS * (group.rank + 1) // group.size)
    watched = Watched(group)
    y, dx, da, trip = mixture(watched, x[mine], dy[mine])
    say(group, f"{TOKENS} tokens, {CHOSEN} of {EXPERTS} experts each, on {group.size} ranks\n")
    say_each(
        group, f"experts {trip.own.start}:{trip.own.stop}, rows for them {trip.counts.tolist()}, sends {trip.sent}"
    )
    say(group, f"  on every rank {len(watched.calls)} calls of {watched.calls[0].op}: counts, x, dy; y, dx")
    own_da = whole_da[trip.own.start : trip.own.stop]
    prove(group, "y, dx, dA of own experts", (y, whole_y[mine]), (dx, whole_dx[mine]), (da, own_da))
    exercise(
        group,
        "Put  chosen[:] = [0, 1]  below np.argsort(-p ...: all tokens go to two hot experts. What do other ranks do "
        "meanwhile, and why does nothing hang? What must a loss that wants equal loads add up, and over whom?",
    )


if __name__ == "__main__":
    on_ranks(main, RANKS)
