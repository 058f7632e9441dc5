"""04  Attention is cut by heads; a KV head lives on every rank whose query heads use it.

    o_h = softmax(mask(q_h k_g^T / sqrt(d))) v_g      query head h uses KV head g = h // (heads / kv_heads)
    y   = sum over ranks r of o_r Wo_r^T              heads are independent until here: one all-reduce

Query heads are dealt one by one, so any number of ranks works. With grouped KV heads (GQA) the ranks at a border need
the same KV head: both hold it, each computes dk and dv from its own query heads, and the two are added in backward.
"""

import numpy as np
from course import Watched, exercise, on_ranks, prove, say, say_each

from mpitp.backend.device import CpuDevice
from mpitp.comm import Group, SerialGroup
from mpitp.layers.attention import AttentionDropout, SelfAttention
from mpitp.layers.build import Builder
from mpitp.layers.init import init_params
from mpitp.layers.layout import Layout
from mpitp.layers.partition import share_heads
from mpitp.layers.sequences import Sequences

RANKS = 4
HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 9, 3, 2, 6
SEQS = Sequences(lengths=(5, 3))  # two sequences, one after the other: t = 8 rows


def make_attention(group: Group) -> SelfAttention:
    """The library's attention, equal weights at every rank count."""
    build = Builder(Layout(group), CpuDevice(), np.float64, init_std=0.7)
    heads = build.layout.heads(HEADS, KV_HEADS)
    layer = build.attention(heads, HEAD_DIM, HIDDEN, AttentionDropout(0.0, ""), qkv_bias=False, out_bias=False)
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
    parts = layer.qkv.weight.spec.parts
    say_each(group, "  ".join(f"{p.name} rows {p.held.start}:{p.held.stop} of {p.size}" for p in parts))

    x, dy = np.random.default_rng(4).standard_normal((2, SEQS.num_tokens, HIDDEN))
    watched.calls.clear()
    y, ctx = layer.forward(x, SEQS)
    say(group, f"\nforward:   {', '.join(str(call) for call in watched.calls)}")
    watched.calls.clear()
    dx = layer.backward(dy, ctx)
    for i, call in enumerate(watched.calls):
        what = "dx" if i == len(watched.calls) - 1 else f"dk and dv of KV head {layer.heads.kv_shared[i]}"
        say(group, f"{'backward:  ' if i == 0 else '           '}{call}   {what}")
    whole_y, whole_ctx = whole.forward(x, SEQS)
    prove(group, "y", (y, whole_y))
    prove(group, "dx", (dx, whole.backward(dy, whole_ctx)))

    pairs, start = [], 0  # q, k and v of one rank are the whole tensors, one below the other
    for part, rows in layer.qkv.weight.spec.local_parts():
        held = slice(start + part.held.start, start + part.held.stop)
        pairs.append((layer.qkv.weight.grad[rows], whole.qkv.weight.grad[held]))
        start += part.size
    prove(group, "dWq, dWk, dWv on every rank", *pairs)

    exercise(
        group,
        "How many collectives does the backward pass need with KV_HEADS = 1 (one KV head for all), and with "
        "KV_HEADS = 9 (one each)? Predict both, then change that number at the top.",
    )


if __name__ == "__main__":
    on_ranks(main, RANKS)
