"""The tour's sentences on mixtures of experts."""

from __future__ import annotations

from mpitp.step.guide import Guide

_F, _B = "forward", "backward"

OWN: dict[tuple[str, str], Guide] = {  # a rank's own work, by what the layer is and the pass
    ("router", _F): Guide(
        "experts",
        "A small product scores all experts for each token; the token goes to the best k, weighed by their scores.",
        "Without a choice every token would go through every expert: all their parameters, and all their work.",
    ),
    ("router", _B): Guide(
        "experts",
        "The scores are differentiable though the choice is not: a useful expert's score grows, and so it is learned.",
        "Without the auxiliary losses, which come in here too, a few experts would get most of the tokens.",
    ),
    ("experts", _F): Guide(
        "experts",
        "Rows are sorted by expert, each expert multiplies those that it has, and they are added with their scores.",
        "With as many places for each expert, crowded ones would drop tokens and idle ones multiply padding.",
    ),
    ("experts", _B): Guide(
        "experts",
        "A token's gradient goes to its experts, weighed by its scores; what they give back is added up.",
        "Were scores applied before the experts, their gradient would be another: the experts aren't linear.",
    ),
    ("shared expert", _F): Guide(
        "experts",
        "An expert that every token goes through: it runs while rows are on their way to the others.",
        "Without it what all tokens need would have to be learned by every expert.",
    ),
    ("shared expert", _B): Guide(
        "experts",
        "The mirror of its forward pass; it too runs while the gradients of rows travel.",
        "Without the gate's gradient it would never learn how much of it a token needs.",
    ),
    ("mixture of experts", _F): Guide(
        "experts",
        "What the chosen experts made is added to what the shared one made.",
        "With one of them alone the token would lose the other's part.",
    ),
    ("mixture of experts", _B): Guide(
        "experts",
        "x went to the router and to the experts, so its gradient is the sum of what they give back.",
        "Without the router's part the layers below would never learn to make tokens easy to route.",
    ),
}
SUMS: dict[tuple[str, str], Guide] = {  # a collective, by the layer's kind and the pass
    ("experts", _F): Guide(
        "experts",
        "Each rank of tp has its columns of every own expert, so that what they made is a summand.",
        "Without it each rank would go on with its own columns' part.",
    ),
    ("experts", _B): Guide(
        "experts",
        "x and the scores were used on every rank of tp, so the gradients of both are sums.",
        "Without that of the scores the router would learn from a part of the experts, another one on each rank.",
    ),
}
