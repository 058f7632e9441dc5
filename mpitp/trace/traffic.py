r"""What tensor parallelism sends, in closed form: from a model's config, the layout and the amount of work alone.

p ranks, L blocks, t tokens through a pass (b of them through the head of a generating pass), width h, head width d,
vocabulary v, s bytes an element. A rank hands to a collective, in the plain layout:

| where                       | pass     | collective   | bytes a rank, a pass                                        |
|-----------------------------|----------|--------------|-------------------------------------------------------------|
| embedding                   | forward  | all_reduce   | t h s                                                       |
| attention out, MLP down     | forward  | all_reduce   | t h s each, in every block                                  |
| loss                        | forward  | all_reduce   | t s (max), 2 t s (sum)                                      |
| head                        | backward | all_reduce   | t h s                                                       |
| MLP up, attention qkv       | backward | all_reduce   | t h s each, in every block                                  |
| KV heads on several ranks   | backward | all_reduce   | 2 t d s for each of them, in every block                    |
| logits, when generating     |          | all_gather   | b v s / p                                                   |
| next token, when generating |          | broadcast    | 8 b                                                         |

In the invariant layout the sums run over blocks of units in global order (`all_reduce_in_order`), and all ranks
together hand in one partial a block, whatever p is.

On the wire, the textbook algorithms send from each rank, for n bytes handed in by it: ring all-reduce 2 n (p-1)/p,
ring all-gather n (p-1), ring reduce-scatter n (p-1)/p, pipelined broadcast n; the ordered sum (slices to their owners,
results back) (n + result) (p-1)/p.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from mpitp.layers.layout import Layout
from mpitp.layers.partition import share_heads
from mpitp.models.config import DecoderConfig

Key = tuple[str, str, str]  # collective, place, pass


@dataclass(slots=True)
class Work:
    """How much went through a model: passes and their tokens, forward, through head and loss, and backward."""

    passes: int = 0
    tokens: int = 0
    head_passes: int = 0
    head_tokens: int = 0
    loss_passes: int = 0
    loss_tokens: int = 0
    backward_passes: int = 0
    backward_tokens: int = 0

    def count(self, name: str, phase: str, tokens: int) -> None:
        """A pass of so many tokens through the layer `name`."""
        kind = {
            ("embedding", "forward"): "",
            ("head", "forward"): "head_",
            ("loss", "forward"): "loss_",
            ("head", "backward"): "backward_",
        }.get((name, phase))
        if kind is not None:
            setattr(self, f"{kind}passes", getattr(self, f"{kind}passes") + 1)
            setattr(self, f"{kind}tokens", getattr(self, f"{kind}tokens") + tokens)

    def as_dict(self) -> dict[str, int]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Expected:
    """What all ranks together hand to one kind of collective at one place, and the formula for a rank and a pass."""

    calls: int  # of each rank
    total_bytes: int  # all calls of all ranks
    formula: str


def expected_traffic(
    config: DecoderConfig, ranks: int, num_blocks: int, itemsize: int, work: Work
) -> dict[Key, Expected]:
    """The closed form of all traffic; `num_blocks` 0: the plain layout. Places without a pass are left out."""
    plain, layers, h, s = not num_blocks, config.num_layers, config.hidden_size, itemsize
    ordered = "all_reduce sum" if plain else "all_reduce_in_order"
    table: dict[Key, Expected] = {}

    def add(op: str, place: str, phase: str, passes: int, tokens: int, width: int, partials: int, formula: str) -> None:
        """`partials`: how many arrays [tokens, width] all ranks together hand in."""
        if passes:
            table[op, place, phase] = Expected(passes, partials * tokens * width * s, formula)

    def add_sum(
        place: str, phase: str, passes: int, tokens: int, width: int, blocks: int, formula: str = "t h s"
    ) -> None:
        add(ordered, place, phase, passes, tokens, width, ranks if plain else blocks, formula)

    up, up_blocks = ("up", 1) if config.model_type == "gpt2" else ("gate_up", 2)
    kv_shared = len(share_heads(config.heads, config.kv_heads, 0, ranks, num_blocks).kv_shared)
    n, t, back, tb = work.passes * layers, work.tokens * layers, work.backward_passes, work.backward_tokens
    in_blocks, tb_blocks = back * layers, tb * layers
    add("all_reduce sum", "embedding", "forward", work.passes, work.tokens, h, ranks, "t h s")
    add_sum("blocks.*.attention.out", "forward", n, t, h, num_blocks)
    add_sum("blocks.*.mlp.down", "forward", n, t, h, num_blocks)
    add("all_reduce max", "loss", "forward", work.loss_passes, work.loss_tokens, 1, ranks, "t s")
    add_sum("loss", "forward", work.loss_passes, work.loss_tokens, 2, num_blocks, "2 t s")
    add_sum("head", "backward", back, tb, h, num_blocks)
    add_sum(f"blocks.*.mlp.{up}", "backward", in_blocks, tb_blocks, h, up_blocks * num_blocks)
    shared_blocks = config.heads // config.kv_heads
    add_sum("blocks.*.attention", "backward", in_blocks * kv_shared, tb_blocks * kv_shared, 2 * config.head_dim,
            shared_blocks, "2 t d s")  # fmt: skip
    add_sum("blocks.*.attention.qkv", "backward", in_blocks, tb_blocks, h, num_blocks + 2 * config.kv_heads)
    return table | _generation(config, ranks, itemsize, work)


def _generation(config: DecoderConfig, ranks: int, itemsize: int, work: Work) -> dict[Key, Expected]:
    """Gathered logits and broadcast tokens: of the passes that went through the head and not on to a loss."""
    passes, rows = work.head_passes - work.loss_passes, work.head_tokens - work.loss_tokens
    if not passes:
        return {}
    return {
        ("all_gather", "model.gather_logits", ""): Expected(passes, rows * config.vocab_size * itemsize, "b v s / p"),
        ("broadcast", "generate.choose", ""): Expected(passes, ranks * rows * 8, "8 b"),
    }


def of_layout(config: DecoderConfig, layout: Layout, itemsize: int, work: Work) -> dict[Key, Expected]:
    """The closed form for a model on this layout."""
    return expected_traffic(config, layout.group.size, layout.num_blocks, itemsize, work)


def wire_bytes(op: str, ranks: int, given: float, result: float) -> float:
    """What the textbook algorithm sends from one rank that hands in `given` bytes for a result of `result`."""
    others = ranks - 1
    if op.startswith("all_reduce_in_order"):
        return (given + result) * others / ranks
    if op.startswith("all_reduce"):
        return 2 * given * others / ranks
    if op == "all_gather":
        return given * others
    if op in ("reduce_scatter", "all_to_all"):
        return given * others / ranks
    return given if others else 0.0
