"""An all-reduce of one's own: a ring of messages, put around the library's group, under a model and in `mpitp`.

    rank r of p cuts x into p pieces and talks to r + 1 and r - 1 only:
    p - 1 steps   send piece r - s on, add what comes to piece r - s - 1          (reduce-scatter)
    p - 1 steps   send piece r + 1 - s on, keep what comes as piece r - s         (all-gather)
    2 n (p - 1) / p numbers sent by every rank, the least there can be; 2 (p - 1) messages one after the other

    python examples/your_own_all_reduce.py        check it on 1, 2, 3 and 5 ranks (threads), under a model too
    mpitp launch -n 3 -- bench allreduce --group examples/your_own_all_reduce.py:Ring
    mpitp launch -n 3 -- train run.toml --set mesh.group=examples/your_own_all_reduce.py:Ring

`Ring` overrides `all_reduce` alone: sums that layers start go through it too, since it is a `ForwardingGroup`. Of a
class that layers would pass by `make_mesh` says so; results other than the library's end a run before it begins.
"""

import numpy as np

from mpitp.comm import ForwardingGroup, Group, SerialGroup, make_mesh, run_threads
from mpitp.comm.own_group import check_group
from mpitp.layers import make_site
from mpitp.models import Batch, config_from_hf, new_model

ADD = {"sum": np.add, "max": np.maximum, "min": np.minimum}
RAW = {"model_type": "llama", "vocab_size": 53, "hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 2}
RAW |= {"intermediate_size": 31, "max_position_embeddings": 16, "initializer_range": 0.3}


class Ring(ForwardingGroup):
    """All-reduce in a ring; everything else is the inner group's. `sent`: bytes so far."""

    def __init__(self, inner: Group) -> None:
        super().__init__(inner)
        self.sent = 0

    def all_reduce(self, x, op="sum", out=None):
        if self.size == 1:
            return self.inner.all_reduce(x, op, out)
        total = np.array(x, copy=True, order="C")  # x is only read
        flat, p, r = total.reshape(-1), self.size, self.rank
        bounds = [len(flat) * i // p for i in range(p + 1)]
        pieces = [flat[start:stop] for start, stop in zip(bounds, bounds[1:], strict=False)]
        for s in range(p - 1):
            into = pieces[(r - s - 1) % p]
            ADD[op](into, self.pass_on(pieces[(r - s) % p], into), out=into)
        for s in range(p - 1):
            into = pieces[(r - s) % p]
            into[...] = self.pass_on(pieces[(r + 1 - s) % p], into)
        if out is None:
            return total
        out[...] = total
        return out

    def pass_on(self, piece, like):
        """Send a piece to the right and return what comes from the left: both started, so that no rank waits first."""
        coming = self.inner.start_recv(np.empty_like(like), (self.rank - 1) % self.size)
        going = self.inner.start_send(piece, (self.rank + 1) % self.size)
        self.sent += piece.nbytes
        result = coming.wait()
        going.wait()
        return result


def passes(group: Group, wrap=None) -> tuple[float, float]:
    """Loss and gradient norm of a small model whose groups are wrapped."""
    model = new_model(config_from_hf(RAW), make_site(make_mesh(group, wrap=wrap), dtype="float64"), seed=1)
    tokens = np.random.default_rng(1).integers(0, RAW["vocab_size"], (2, 11))
    batch = Batch.of_rows(tokens[:, :-1], targets=tokens[:, 1:])
    loss, ctx = model.loss_forward(batch)
    model.loss_backward(ctx, 1.0)
    owned = [param.grad[at] for _, param in model.named_params() for _, at in param.placement.owned()]
    return loss, model.site.ranks.all_reduce(np.array([sum((part**2).sum() for part in owned)]))[0] ** 0.5


def run(group: Group) -> str:
    check_group(Ring, group, "Ring")
    ring = Ring(group)
    ring.all_reduce(np.ones(1000 * group.size))
    formula = 2 * 8 * 1000 * group.size * (group.size - 1) // group.size
    assert ring.sent == formula
    found, expected = passes(group, Ring), passes(SerialGroup())
    assert np.allclose(found, expected, rtol=1e-12)
    return f"loss {found[0]:.9f}, gradient norm {found[1]:.9f}, {ring.sent} bytes sent = 2 n (p - 1) / p"


if __name__ == "__main__":
    import course

    course.tidy_ctrl_c()
    for ranks in (1, 2, 3, 5):
        print(f"{ranks} rank(s): {run_threads(ranks, run)[0]}")
