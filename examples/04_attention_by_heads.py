"""04  Attention is cut by heads; a KV head lives on every rank whose query heads use it.

    o_h = softmax(mask(q_h k_g^T / sqrt(d))) v_g      query head h uses KV head g = h // (heads / kv_heads)
    y   = sum over ranks r of o_r Wo_r^T              heads are independent until here: one all-reduce

Query heads are dealt one by one, so any number of ranks works. With grouped KV heads (GQA) the ranks at a border need
the same KV head: both hold it, each computes dk and dv from its own query heads, and the two are added in backward.
"""

import numpy as np
from course import Watched, exercise, on_ranks, prove, say, say_each

from mpitp.comm import Group, SerialGroup
from mpitp.layers import AttentionDropout, AttentionSizes, Builder, Pass, Rows, SelfAttention, init_params, make_site
from mpitp.layers.partition import share_heads

RANKS = 4
HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 9, 3, 2, 6
ROWS = Rows.of(lengths=(5, 3))  # two sequences, one after the other: t = 8 rows


def make_attention(group: Group) -> SelfAttention:
    """The library's attention, equal weights at every rank count."""
    site = make_site(group, dtype="float64")
    sizes = AttentionSizes(site.heads(HEADS, KV_HEADS), HEAD_DIM, HIDDEN)
    layer = Builder(site, init_std=0.7).attention(sizes, AttentionDropout(0.0, ""))
    init_params(layer.params().items(), seed=4)
    return layer


def main(group: Group) -> None:
    say(group, f"{HEADS} query heads on {KV_HEADS} KV heads, dealt to ...")
    for ranks in (2, 3, 4):
        dealt = [share_heads(HEADS, KV_HEADS, rank, ranks) for rank in range(ranks)]
        cells = [f"q{h.query.span.start}-{h.query.span.stop - 1} kv{','.join(map(str, h.kv))}" for h in dealt]
        shared = ",".join(map(str, dealt[0].kv_shared)) or "none"
        say(group, f"  {ranks} ranks: {' | '.join(cells):<48} KV on several: {shared}")

    watched = Watched(group)
    layer, whole = make_attention(watched), make_attention(SerialGroup())
    say(group, f"\nThe real layer on {group.size} ranks, weight rows [q | k | v] on each:")
    weight, whole_weight = layer.qkv.product.weight, whole.qkv.product.weight
    held = [(part.name, part.held[0], part.shape[0]) for part in weight.placement.parts]
    say_each(group, "  ".join(f"{name} rows {f'{rows.start}:{rows.stop}':<5} of {size}" for name, rows, size in held))

    x, dy = np.random.default_rng(4).standard_normal((2, ROWS.num_tokens, HIDDEN))
    watched.calls.clear()
    y, ctx = layer.forward(x, Pass(ROWS))
    say(group, f"\nforward:   {', '.join(str(call) for call in watched.calls)}")
    watched.calls.clear()
    dx = layer.backward(dy, ctx)
    for i, call in enumerate(watched.calls):
        what = "dx" if i == len(watched.calls) - 1 else f"dk and dv of KV head {layer.heads.heads.kv_shared[i]}"
        say(group, f"{'backward:  ' if i == 0 else '           '}{call!s:<34}{what}")
    whole_y, whole_ctx = whole.forward(x, Pass(ROWS))
    prove(group, "y", (y, whole_y))
    prove(group, "dx", (dx, whole.backward(dy, whole_ctx)))

    both = zip(weight.placement.places(), whole_weight.placement.places(), strict=True)  # q, then k, then v
    pairs = [(weight.grad[here], whole_weight.grad[there][part.index]) for (part, here), (_, there) in both]
    prove(group, "dWq, dWk, dWv on every rank", *pairs)

    exercise(
        group,
        "How many collectives does the backward pass need with KV_HEADS = 1 (one KV head for all), and with "
        "KV_HEADS = 9 (one each)? Predict both, then change that number at the top.",
    )


if __name__ == "__main__":
    on_ranks(main, RANKS)
