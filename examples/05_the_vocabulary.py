"""05  The vocabulary is cut too: an embedding by masking, a cross entropy without gathering the logits.

    embedding   y[i] = sum over ranks of (E_r[id_i] if id_i is one of rank r's rows, else 0)
    loss        loss_i = log Z_i + m_i - logit[i, target_i]
                m_i = max over ranks,   Z_i = sum over ranks of sum_j exp(logit_ij - m_i)

Of the softmax over v columns the ranks exchange three numbers a token: its maximum, its denominator, its target's
logit. With v = 50,000 the logits themselves would be 50,000 numbers a token.
"""

import numpy as np
from course import Watched, exercise, nbytes, on_ranks, prove, say, say_each

from mpitp.comm import Group, SerialGroup
from mpitp.layers import (
    Builder,
    ColumnParallelLinear,
    VocabParallelCrossEntropy,
    VocabParallelEmbedding,
    init_params,
    make_site,
)

RANKS = 3
VOCAB, HIDDEN = 50, 4
IDS, TARGETS = np.array([3, 17, 40, 49, 3]), np.array([17, 40, 49, 3, 0])
Layers = tuple[VocabParallelEmbedding, ColumnParallelLinear, VocabParallelCrossEntropy]


def make_layers(group: Group) -> Layers:
    """Embedding, head and loss; the head uses the embedding's table (tied)."""
    site = make_site(group, dtype="float64")
    build, vocab = Builder(site, init_std=1.0), site.share(VOCAB)
    table = build.vocab_table(vocab, HIDDEN)
    init_params([("embedding.weight", table.params()["weight"])], seed=5)
    return build.embedding(table, vocab), build.head(table, vocab), build.loss(vocab)


def run(layers: Layers) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The looked-up rows, this rank's logits, and the losses; gradients are left in the table."""
    embedding, head, loss = layers
    y, embedding_ctx = embedding.forward(IDS)
    logits, head_ctx = head.forward(y)
    losses, loss_ctx = loss.forward(logits, TARGETS)
    dy = head.backward(loss.backward(np.ones(len(IDS)), loss_ctx), head_ctx)
    embedding.backward(dy, embedding_ctx)
    return y, logits, losses


def main(group: Group) -> None:
    watched = Watched(group)
    layers, whole = make_layers(watched), make_layers(SerialGroup())
    vocab = layers[0].vocab.span
    say(group, f"A vocabulary of {VOCAB} on {group.size} ranks; ids {IDS}, targets {TARGETS}")
    found = [int(i) for i in IDS if i in vocab]
    say_each(group, f"table rows {vocab.start}:{vocab.stop}, looks up {found} and gives zeros for the rest")

    y, logits, losses = run(layers)
    whole_y, whole_logits, whole_losses = run(whole)
    names = ["embedding", "loss: m, the maximum", "loss: Z and target's logit", "head: dx"]
    say(group, "\nthe collectives of forward and backward, with the bytes a rank hands in:")
    for name, call in zip(names, watched.calls, strict=True):
        say(group, f"  {name:<28}{call!s:<36}{nbytes(call):>6} bytes")
    loss_bytes = sum(nbytes(call) for call in watched.calls[1:3])
    say(group, f"  the loss exchanged {loss_bytes} bytes; all logits would be {len(IDS) * VOCAB * 8}\n")

    columns = slice(vocab.start, vocab.stop)
    prove(group, "looked-up rows, to the last bit", (y, whole_y), limit=0.0)
    prove(group, "each rank's columns of the logits", (logits, whole_logits[:, columns]))
    prove(group, "losses on every rank", (losses, whole_losses))
    prove(group, "gradient of the table", (layers[0].weight.grad, whole[0].weight.grad[columns]))

    exercise(
        group,
        "The looked-up rows are equal to the last bit on any number of ranks, though they are summed. Why can't this "
        "sum round? Then set VOCAB = 50000: how many bytes does the loss exchange now?",
    )


if __name__ == "__main__":
    on_ranks(main, RANKS)
