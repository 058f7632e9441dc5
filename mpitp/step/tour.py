"""The guided tour: why each operation is there, what would break without it, and the example that teaches it."""

from __future__ import annotations

from mpitp.step import guides_of_experts
from mpitp.step.film import UPDATE, WEIGHT_GRADS, WEIGHTS, Op
from mpitp.step.guide import Guide
from mpitp.step.guides_of_encoders import OWN, SUMS, TO_ROWS
from mpitp.step.moves import GRADIENTS

_F, _B = "forward", "backward"
_COLUMN, _ROW = "column-parallel linear", "row-parallel linear"
_EMBEDDING, _LOSS = "vocabulary-parallel embedding", "vocabulary-parallel cross entropy"
_HEADS, _RESIDUAL = "attention of each rank's heads", "residual connection"
_NORM = Guide(
    "block",
    "Every row is brought to one size. Its mean needs the whole row, so all ranks do it alike.",
    "If x were cut by columns here, the mean would need a sum over the ranks for every row.",
)
_NORM_BACK = Guide(
    "backward",
    "The mirror of the norm: every rank has the whole dy and makes the same dx and dW.",
    "Were dy still partial, the ranks' weights would drift apart: nobody sums dW here.",
)
_ACTIVATION = Guide(
    "linear",
    "The nonlinearity sits between the column cut and the row cut: each rank has whole entries of its own columns.",
    "Behind a row cut the entries would be partial, and f(a + b) isn't f(a) + f(b): a sum would be needed first.",
)
_ACTIVATION_BACK = Guide(
    "backward",
    "Element by element, as forward: each rank needs its own columns alone.",
    "Without it the gradient would be that of a linear network.",
)

_OWN: dict[tuple[str, str], Guide] = {  # a rank's own work, by what the layer is and the pass
    **OWN,
    **guides_of_experts.OWN,
    (_EMBEDDING, _F): Guide(
        "vocabulary",
        "Each token becomes a row of E. Every rank holds some rows of the table, and gives zeros for the others.",
        "Without the cut each rank would hold the largest matrix of a small model whole.",
    ),
    (_EMBEDDING, _B): Guide(
        "vocabulary",
        "The gradient of a token's row is added to the row that gave it, on the rank that holds it.",
        "Without += a token that comes twice would count once.",
    ),
    (_COLUMN, _F): Guide(
        "linear",
        "W is cut along its outputs, so each rank makes its own columns of y from the whole x: nothing is sent.",
        "With W cut along its inputs instead, a sum would be needed before the nonlinearity or the heads.",
    ),
    (_COLUMN, _B): Guide(
        "backward",
        "Each rank's dy gives a part of dx, since every rank has used the whole x, and its own rows of dW.",
        "Without dW_r this rank's weights would never learn; dW needs no sum, since nobody else holds these rows.",
    ),
    (_ROW, _F): Guide(
        "linear",
        "W is cut along its inputs, where x is cut already: the rank's product is one summand of y.",
        "With x gathered first, more would be sent and every rank would multiply the whole matrix.",
    ),
    (_ROW, _B): Guide(
        "backward",
        "dy is on every rank, so each makes its own columns of dx and its own dW: nothing is sent.",
        "With a sum here each gradient would be counted once a rank.",
    ),
    (_HEADS, _F): Guide(
        "attention",
        "A head looks at its own q, k and v only: the heads are dealt to the ranks and nothing is sent.",
        "If the cut ran through a head, every score would be a partial sum and have to be summed before the softmax.",
    ),
    (_HEADS, _B): Guide(
        "attention",
        "The softmax is made again from what was kept, and gives dq, dk and dv of this rank's heads.",
        "Were all t x t probabilities kept instead, memory would grow with the square of the sequence.",
    ),
    (_LOSS, _F): Guide(
        "vocabulary",
        "Each rank looks at its own part of the vocabulary; the others need three numbers a token: max, sum, target.",
        "Gathering the logits would send the whole vocabulary for every token.",
    ),
    (_LOSS, _B): Guide(
        "vocabulary",
        "m and Z are on every rank, so each has the gradient of its own logits at once.",
        "Without the 1 at the target nothing would be learned from the text.",
    ),
    (_RESIDUAL, _F): Guide(
        "block",
        "What the branch found is added to what went past it; all ranks have the same rows.",
        "If the branch were still partial, x would be counted once a rank in the sum after it.",
    ),
    (_RESIDUAL, _B): Guide(
        "backward",
        "x was used twice, by the branch and past it, so its gradient is the sum of both.",
        "Without it the gradient would have to find its way through every branch, and early layers would hardly learn.",
    ),
    ("learned positions", _F): Guide(
        "vocabulary",
        "Each row gets the vector of its position; the table is small and on every rank.",
        "Without positions attention couldn't tell the order of the tokens.",
    ),
    ("learned positions", _B): Guide(
        "vocabulary",
        "dy goes to x and, position by position, to the table; the same on every rank.",
        "Were dy partial here, the copies of the table would drift apart.",
    ),
    ("gradient norm", UPDATE): Guide(
        "optimizer",
        "The length of the whole gradient: each rank adds up the squares of the blocks that it owns.",
        "If ranks counted replicas (norms, shared KV heads) too, the norm would depend on the number of ranks.",
    ),
    ("clipping", UPDATE): Guide(
        "optimizer",
        "A gradient longer than the limit is scaled down, by one factor for all ranks.",
        "With a factor of its own on each rank the update would point elsewhere, and replicas would drift apart.",
    ),
    ("AdamW", UPDATE): Guide(
        "optimizer",
        "Each entry's step is its mean gradient over the root of its mean square: its own history alone.",
        "Without m and v it would be plain gradient descent; they are twice the weights in memory, cut as they are.",
    ),
}
_SUMS: dict[tuple[str, str], Guide] = {  # a collective, by the layer's kind and the pass
    **SUMS,
    **guides_of_experts.SUMS,
    (_EMBEDDING, _F): Guide(
        "vocabulary",
        "One rank holds the row of each token, the others have zeros: the sum puts it on every rank.",
        "Without it each rank would go on with zeros for the tokens of the others.",
    ),
    (_ROW, _F): Guide(
        "linear",
        "Every rank has a summand of y: this sum is the price of the two cut products before it.",
        "Without it each rank would go on with its own part, and all later layers would differ from rank to rank.",
    ),
    (_COLUMN, _B): Guide(
        "backward",
        "Forward every rank used the same x, so dx is the sum of what comes from all of them: the conjugate of a copy.",
        "Without it each rank would learn from its own columns alone; forward looks right, so only training shows it.",
    ),
    (_HEADS, _B): Guide(
        "attention",
        "A KV head that query heads on several ranks use lives on all of them: its gradient is the sum of theirs.",
        "Without it the copies of this head would drift apart, and the model would be another at each number of ranks.",
    ),
    (_LOSS, _F): Guide(
        "vocabulary",
        "The softmax runs over the whole vocabulary: its largest logit, its sum and the target's come from all ranks.",
        "Without it each rank would normalise over its own words only.",
    ),
    ("gradient norm", UPDATE): Guide(
        "optimizer",
        "The one collective of the update: every rank must know the whole norm to clip alike.",
        "Without it each rank would clip by its own part, and replicated weights would differ after one step.",
    ),
}
_GATHER = Guide(
    "tokens cut",
    "Between the cut products each rank holds some tokens only; the product needs all rows, so they are gathered.",
    "Without it every rank would multiply its own rows by its own columns, and most of y would be nowhere.",
)
_SCATTER = Guide(
    "tokens cut",
    "The sum of all ranks' parts, of which each rank keeps its own tokens: half of an all-reduce.",
    "An all-reduce would be right too, but every rank would hold all rows between the products.",
)
_AMONG: dict[str, Guide] = {  # what goes between stages, replicas and pieces of a sequence
    "send": Guide(
        "pipeline",
        "The next stage has the next blocks: x goes there, and dx comes back on the same way.",
        "Without it that stage would wait for ever; started and not waited for, it runs beside the next microbatch.",
    ),
    "recv": Guide(
        "pipeline",
        "This stage can't begin before the one before it has sent: what it waits is the pipeline's bubble.",
        "Without a wait it would compute with what lies in the memory by chance.",
    ),
    "kv": Guide(
        "context",
        "Queries stay with their tokens, keys and values go round: each rank meets all keys, a piece at a time.",
        "Without the round each query would see the keys of its own piece only.",
    ),
    "columns to rows": TO_ROWS,
    "all_to_all": Guide(
        "context",
        "Rows of all heads become all rows of own heads: attention of a head then has the whole sequence on one rank.",
        "Without it no rank would have both a query and all of its keys.",
    ),
    "to experts": Guide(
        "experts",
        "Each row goes to the rank that has its expert, and what the expert made comes home the same way.",
        "Without it each rank would need all experts: the model would have to fit into every rank's memory.",
    ),
    "rows": Guide(
        "tokens cut",
        "Under sequence parallelism a rank's norm weights have seen its own rows only: their gradients are summands.",
        "Without it the ranks' norm weights would drift apart from the first step on.",
    ),
    "weights": Guide(
        "replicas",
        "Each replica has the moments of its own rows and has updated these: now all get the rows of the others.",
        "Without it every replica would compute the next step with some rows of the new weights and some of the old.",
    ),
    "rows of weights": Guide(
        "replicas",
        "Each replica keeps some rows of W alone; the layer needs all of them, so they are gathered when it is to run.",
        "Without it the layer would multiply by a part of W; kept whole, W would take its room on every replica.",
    ),
    "in order": Guide(
        "replicas",
        "The gradients of all microbatches are added in the order of their numbers, as one rank alone would add them.",
        "A sum in another order rounds to other bits: the run would depend on the number of replicas.",
    ),
    "gradients": Guide(
        "replicas",
        "Every replica has seen other sequences; their gradients add up to that of the whole batch.",
        "Without it the replicas would train apart, each on its own part of the data.",
    ),
}
_LATER = Guide(
    "pipeline",
    "The stage before needs dx at once; dW is needed at the update only, and fills the time in which nothing has come.",
    "Done at once, as in 1F1B, every stage before this one would get its dx later: the bubble would be longer.",
)
_OTHER = {
    _F: Guide(
        "block", "A layer of its own: its equation says what it does.", "The passes after it would see another x."
    ),
    _B: Guide("backward", "The mirror of its forward pass.", "What comes before it would get no gradient."),
    UPDATE: Guide("optimizer", "The end of the step.", "The weights would stay as they are."),
}
_NORMS, _ACTIVATIONS = ("RMSNorm", "LayerNorm"), ("SwiGLU", "GELU", "activation")


_EXCHANGES = {"ep": "to experts", "tp": "columns to rows"}  # what an all-to-all along an axis is


def guide(op: Op) -> Guide:
    """What the tour says of an operation; of a layer of one's own, what holds for all."""
    kind = op.collective.partition(" ")[0]
    if op.peers or kind == "all_to_all":
        return _AMONG["kv" if op.axis == "cp" and op.peers else _EXCHANGES.get(op.axis, kind)]
    if op.title == WEIGHT_GRADS:
        return _LATER
    if op.subject == WEIGHTS:
        return _AMONG[WEIGHTS if op.phase == UPDATE else "rows of weights"]
    if op.subject == GRADIENTS and kind == "all_reduce_in_order":
        return _AMONG["in order"]
    if op.subject == GRADIENTS:
        return _AMONG["rows" if op.axis == "tp" else "gradients"]
    if kind == "all_gather" and (op.subject, op.phase) not in SUMS:
        return _GATHER
    if kind == "reduce_scatter" and (op.subject, op.phase) not in SUMS:
        return _SCATTER
    if op.collective:
        return _SUMS.get((op.subject, op.phase), _SUMS[_ROW, _F] if op.phase == _F else _SUMS[_COLUMN, _B])
    if op.subject in _NORMS:
        return _NORM if op.phase == _F else _NORM_BACK
    if op.subject in _ACTIVATIONS or op.subject.startswith("gated "):
        return _ACTIVATION if op.phase == _F else _ACTIVATION_BACK
    return _OWN.get((op.subject, op.phase), _OTHER[op.phase])
