"""A parallel layer of one's own: a gated bottleneck beside the residual stream, its inner columns dealt to the ranks.

    y = x + g * relu(x Wup^T)^2 Wdown^T           x, y [t, h]   Wup [m/tp, h]   Wdown [h, m/tp]   g [h] on every rank

    python examples/your_own_layer.py             check it on 2, 3 and 5 ranks (threads) against one

The layer is `GatedBottleneck`; the rest puts it into a model, compares loss and gradients with those of one rank, and
shows what is said when a sum is forgotten. All imports are from the top of mpitp's packages.
"""

import numpy as np

from mpitp.comm import Group, SerialGroup, run_threads
from mpitp.errors import PlacementError
from mpitp.layers import Builder, Layer, ReduceFromTP, Site, init_params, make_site
from mpitp.models import Batch, CausalLM, config_from_hf, new_model


class GatedBottleneck(Layer):
    """Column-parallel, relu squared, row-parallel, times a gate: one all-reduce forward (y), one backward (dx)."""

    def __init__(self, site: Site, hidden: int, inner: int) -> None:
        build, share = Builder(site, init_std=0.2), site.share(inner)  # the share: this rank's inner columns
        self.up = build.column(("up",), hidden, share, bias=False)  # a product times CopyToTP: I to V
        self.down = build.row("down", share, hidden, bias=False)  # a product times ReduceFromTP: V to I
        self.gate = site.whole(hidden, value=0.5)  # the same on every rank

    def forward(self, x, run=None):
        inner, up_ctx = self.up.forward(x)  # [t, m/tp]
        act = inner * (inner > 0)
        branch, down_ctx = self.down.forward(act * act)  # [t, h]
        return x + self.gate.data * branch, (up_ctx, act, down_ctx, branch)

    def backward(self, dy, ctx):
        up_ctx, act, down_ctx, branch = ctx
        self.gate.accumulate((dy * branch).sum(axis=0))
        dsquare = self.down.backward(dy * self.gate.data, down_ctx)  # [t, m/tp]
        return dy + self.up.backward(2 * act * dsquare, up_ctx)

    def children(self):
        return {"up": self.up, "down": self.down, "gate": self.gate}

    def placements(self, incoming):
        inner = self.up.placements(incoming)
        inner.expect_summed("what is squared")  # the square of a sum is no sum of squares
        branch = self.down.placements(inner)
        branch.expect_gradient_summed("gate", self.gate)
        incoming.expect_like(branch, "the bottleneck's branch")
        return branch


CONFIG = config_from_hf(
    {
        "model_type": "llama",
        "vocab_size": 53,
        "hidden_size": 12,
        "num_attention_heads": 6,
        "num_hidden_layers": 1,
        "intermediate_size": 31,
        "max_position_embeddings": 16,
        "initializer_range": 0.3,
    }
)


def make_model(site: Site) -> CausalLM:
    """A model with the layer between its block and its last norm; equal weights at every rank count."""
    model, layer = new_model(CONFIG, site, seed=1), GatedBottleneck(site, CONFIG.hidden_size, inner=7)
    init_params(((f"bottleneck.{name}", param) for name, param in layer.params().items()), seed=1)
    *others, norm, head = model.layers.items()
    model.layers = dict([*others, ("bottleneck", layer), norm, head])
    model.types()  # raises PlacementError where the layers don't fit one another; nothing is computed
    return model


def run(group: Group) -> tuple[float, CausalLM]:
    model = make_model(make_site(group, dtype="float64"))
    tokens = np.random.default_rng(1).integers(0, CONFIG.vocab_size, (2, 10))
    loss, ctx = model.loss_forward(Batch.of_rows(tokens[:, :-1], targets=tokens[:, 1:]))
    model.loss_backward(ctx, scale=1.0)
    return loss, model


def largest_difference(group: Group) -> float:
    """Of the loss and of every gradient, to those of one rank."""
    (loss, model), (whole_loss, whole) = run(group), run(SerialGroup())
    worst = abs(loss - whole_loss)
    for (_, mine), (_, full) in zip(model.named_params(), whole.named_params(), strict=True):
        for (part, here), (_, there) in zip(mine.placement.places(), full.placement.places(), strict=True):
            worst = max(worst, np.abs(mine.grad[here] - full.grad[there][part.index]).max(initial=0.0))
    return float(group.all_reduce(np.array([worst]), op="max")[0])


class Forgotten(ReduceFromTP):
    """No sum: this rank's partial y is handed on as it is, and says so."""

    def forward(self, y_partials, like):
        return sum(y_partials, start=np.zeros_like(like))

    def placements(self, incoming):
        return incoming


def complaint(group: Group) -> str:
    """What is said of the model without the sum, before anything is computed."""
    site = make_site(group)
    model = make_model(site)
    model["bottleneck"].down.reduce = Forgotten(site.summation())
    try:
        model.types()
    except PlacementError as error:
        return str(error)
    return "nothing"


if __name__ == "__main__":
    import course

    course.tidy_ctrl_c()
    for ranks in (2, 3, 5):
        worst = run_threads(ranks, largest_difference)[0]
        print(f"{'PROOF' if worst < 1e-12 else 'WRONG'}  {ranks} ranks against one: largest difference {worst:.1e}")
    print("without the sum:", run_threads(2, complaint)[0])
