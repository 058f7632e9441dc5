"""What a collective sends, round by round: the textbook algorithms as data, for whoever draws them.

    ring     p pieces; p - 1 rounds that add, p - 1 that copy                     2 n (p-1)/p bytes from each rank
    tree     halves the number of ranks in each round towards rank 0, and back    2 n log2(p) rounds, whole arrays
    window   shared memory of a node: operands in, each rank adds one slice, results out
    direct   each rank sends each other one its block

Nothing is sent here and no sizes are known: a message names its piece, which is a p-th part of the array.
"""

from __future__ import annotations

from dataclasses import dataclass

WHOLE, WINDOW = -1, -1  # instead of a piece: all of them; instead of a rank: the memory that all see


@dataclass(frozen=True, slots=True)
class Message:
    """`piece` goes to another rank, which adds it to its own (`adds`) or keeps it. `times`: so many of them."""

    source: int
    dest: int
    piece: int
    adds: bool = False
    times: int = 1

    def as_list(self) -> list[int]:
        """For the page."""
        return [self.source, self.dest, self.piece, int(self.adds), self.times]


Rounds = tuple[tuple[Message, ...], ...]


def ring_reduce_scatter(ranks: int) -> Rounds:
    """Afterwards rank r has the whole sum of piece r."""
    return tuple(
        tuple(Message(r, (r + 1) % ranks, (r - step - 1) % ranks, adds=True) for r in range(ranks))
        for step in range(ranks - 1)
    )


def ring_all_gather(ranks: int) -> Rounds:
    """Rank r begins with piece r; afterwards all have all."""
    return tuple(
        tuple(Message(r, (r + 1) % ranks, (r - step) % ranks) for r in range(ranks)) for step in range(ranks - 1)
    )


def ring_all_reduce(ranks: int) -> Rounds:
    """A reduce-scatter, then an all-gather."""
    return ring_reduce_scatter(ranks) + ring_all_gather(ranks)


def tree_all_reduce(ranks: int) -> Rounds:
    """A binomial tree up to rank 0 and down again; each message is the whole array."""
    strides = [1 << i for i in range((ranks - 1).bit_length())]
    pairs = [[(low, low + stride) for low in range(0, ranks - stride, 2 * stride)] for stride in strides]
    up = [tuple(Message(high, low, WHOLE, adds=True) for low, high in each) for each in pairs]
    down = [tuple(Message(low, high, WHOLE) for low, high in each) for each in reversed(pairs)]
    return (*up, *down)


def window_all_reduce(ranks: int) -> Rounds:
    """Each rank writes its operand, adds the others' slice r to its own, writes that, and reads the rest."""
    if ranks == 1:
        return ()
    each = range(ranks)
    return (
        tuple(Message(r, WINDOW, WHOLE, adds=True) for r in each),
        tuple(Message(WINDOW, r, r, adds=True, times=ranks - 1) for r in each),
        tuple(Message(r, WINDOW, r) for r in each),
        tuple(Message(WINDOW, r, piece) for r in each for piece in each if piece != r),
    )


def chain_broadcast(ranks: int) -> Rounds:
    """From rank 0 from neighbour to neighbour."""
    return tuple((Message(r, r + 1, WHOLE),) for r in range(ranks - 1))


def direct_all_to_all(ranks: int) -> Rounds:
    """In round k rank r sends its block for rank r + k there."""
    return tuple(
        tuple(Message(r, (r + step) % ranks, (r + step) % ranks) for r in range(ranks)) for step in range(1, ranks)
    )


def one_message(ranks: int) -> Rounds:
    """Rank 0 to rank 1, as between two stages of a pipeline."""
    return ((Message(0, 1, WHOLE),),) if ranks > 1 else ()


ALGORITHMS = {
    "all_reduce": {"ring": ring_all_reduce, "tree": tree_all_reduce, "window": window_all_reduce},
    "all_gather": {"ring": ring_all_gather},
    "reduce_scatter": {"ring": ring_reduce_scatter},
    "all_to_all": {"direct": direct_all_to_all},
    "send": {"one message": one_message},
    "broadcast": {"chain": chain_broadcast},
}
# What the other pass does, and why.
CONJUGATES = {
    "all_reduce": ("copy", "y = sum_r x_r: each x_r has the gradient dy, which every rank has: nothing is sent"),
    "all_gather": ("reduce_scatter", "every rank used piece r: its gradient is the sum of theirs, on rank r"),
    "reduce_scatter": ("all_gather", "rank r's sum is of all ranks' pieces r: each of them needs its gradient"),
    "all_to_all": ("all_to_all", "the gradient of a block goes back the way that the block came"),
    "send": ("send", "the gradient goes from the receiver to the sender"),
    "broadcast": ("all_reduce", "every rank used x: its gradient is the sum of theirs (only the root needs it)"),
}


def kind_of(collective: str) -> str:
    """Whose rounds are shown: "all_reduce sum" and the ordered sum are an all_reduce."""
    kind = collective.partition(" ")[0]
    return {"all_reduce_in_order": "all_reduce", "recv": "send"}.get(kind, kind)


def schedules(ranks: int) -> dict[str, dict[str, list[list[list[int]]]]]:
    """All algorithms for so many ranks, for the page."""
    return {
        kind: {name: [[each.as_list() for each in messages] for messages in make(ranks)] for name, make in ways.items()}
        for kind, ways in ALGORITHMS.items()
    }


def told_rounds(rounds: Rounds) -> list[str]:
    """One line a round."""
    lines = []
    for number, messages in enumerate(rounds, start=1):
        what = "adds" if messages[0].adds else "copies"
        sent = ", ".join(f"{_node(m.source)}>{_node(m.dest)} {_piece(m)}" for m in messages)
        lines.append(f"round {number} {what}: {sent}")
    return lines


def _node(rank: int) -> str:
    return "window" if rank == WINDOW else str(rank)


def _piece(message: Message) -> str:
    return "all" if message.piece == WHOLE else f"piece {message.piece}"
