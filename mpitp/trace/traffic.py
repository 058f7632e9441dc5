r"""What a model sends, in closed form: from what its layers say that they send (`Layer.sends`) and the amount of work
alone.

p ranks, t tokens through a pass (b of them through the head of a generating pass), width h, head width d, vocabulary v,
k of e experts a token, s bytes an element. A rank hands to a collective, in the plain layout:

| where                       | pass     | collective   | bytes a rank, a pass                                        |
|-----------------------------|----------|--------------|-------------------------------------------------------------|
| embedding                   | forward  | all_reduce   | t h s (t of an encoder, and of what reads it, the source's) |
| attention out, MLP down     | forward  | all_reduce   | t h s each, in every block                                  |
| loss                        | forward  | all_reduce   | t s (max), 2 t s (sum)                                      |
| head                        | backward | all_reduce   | t h s                                                       |
| MLP up, attention qkv       | backward | all_reduce   | t h s each, in every block                                  |
| KV heads on several ranks   | backward | all_reduce   | 2 t d s for each of them, in every block                    |
| logits, when generating     |          | all_gather   | b v s / p                                                   |
| between stages (pp)         | both     | send, recv   | t h s, for each chunk of the model that begins or ends there|
|                             | both     | send, recv   | t h s of the source beside it, in a decoder that reads one  |
| attention, cp in a ring     | both     | send, recv   | 2 t g d s: keys and values, (p-1) times; gradients p times  |
| attention, cp over heads    | both     | all_to_all   | t (a+2g) d s and t a d s                                    |
| cross attention, cp         | forward  | all_gather   | 2 t a d s / p, t of the source                              |
|                             | backward | reduce_scat. | 2 t a d s                                                   |
| experts, in place of an MLP | forward  | all_reduce   | t h s                                                       |
|                             | backward | all_reduce   | t h s and t k s (scores)                                    |
| experts over ep             | both     | all_to_all   | k t h s there and as much back; forward 8 e beside          |
| router, rows cut (cp, sp)   | forward  | all_reduce   | 16 (e + 1): what the auxiliary losses count                 |

With sequence parallelism each of these all_reduces of t h s becomes a reduce_scatter of t h s there and an all_gather
of t/p h s, the rank's own tokens, in the pass the other way.

In the invariant layout the sums run over blocks of units in global order (`all_reduce_in_order`), and all ranks
together hand in one partial a block, whatever p is.

On the wire, the textbook algorithms send from each rank, for n bytes handed in by it: ring all-reduce 2 n (p-1)/p,
ring all-gather n (p-1), ring reduce-scatter n (p-1)/p, pipelined broadcast n; the ordered sum (slices to their owners,
results back) (n + result) (p-1)/p.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from mpitp.backend.precision import wide_dtype
from mpitp.layers.gathered import in_whole_shapes
from mpitp.layers.layer import BACKWARD, FORWARD, Layer, Wrapper, walk
from mpitp.layers.recompute import Recompute
from mpitp.models.beside import gives_memory, takes_memory
from mpitp.models.encoder_decoder import EncoderDecoder
from mpitp.models.layered import LayeredModel
from mpitp.models.model import EMBEDDING, HEAD, CausalLM
from mpitp.models.stages import Chunk
from mpitp.models.vision_config import VisionConfig

Key = tuple[str, str, str]  # collective, place, pass

INDEX_BYTES = COUNT_BYTES = 8

_BLOCK = re.compile(r"(^|\.)blocks\.\d+")


def folded(name: str) -> str:
    """The name of a layer with all blocks told as one: blocks.*.mlp.down, encoder.blocks.*.mlp.down."""
    return _BLOCK.sub(r"\1blocks.*", name)


@dataclass(slots=True)
class Work:
    """How much went through each layer: passes and their tokens, by its name and the kind of pass. `entrance`: the
    layer that takes the model's inputs.
    """

    entrance: str = EMBEDDING
    counts: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    ends: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)

    def count(self, name: str, phase: str, tokens: int, ends: tuple[int, int]) -> None:
        """A pass of so many tokens through the layer `name`. `ends`: rows of what has gone in and come out."""
        passes, before = self.of(name, phase)
        self.counts[name, phase] = passes + 1, before + tokens
        others = self.ends_of(name, phase)
        self.ends[name, phase] = others[0] + ends[0], others[1] + ends[1]

    def ends_of(self, name: str, phase: str) -> tuple[int, int]:
        """Rows that have gone into a layer and come out of it in all passes."""
        return self.ends.get((name, phase), (0, 0))

    def of(self, name: str, phase: str) -> tuple[int, int]:
        """Passes through a layer, and their tokens."""
        return self.counts.get((name, phase), (0, 0))

    @property
    def passes(self) -> int:
        """Forward passes through the model."""
        return self.of(self.entrance, FORWARD)[0]

    def as_dict(self) -> dict[str, dict[str, int]]:
        """For JSON: what went into the model, through its head and its loss, and back."""
        places = [(self.entrance, FORWARD), (HEAD, FORWARD), ("loss", FORWARD), (HEAD, BACKWARD)]
        return {f"{n} {phase}": dict(zip(("passes", "tokens"), self.of(n, phase), strict=True)) for n, phase in places}


@dataclass(frozen=True, slots=True)
class Expected:
    """What all ranks together hand to one kind of collective at one place, and the formula for a rank and a pass."""

    calls: int  # of the rank that calls most often
    total_bytes: int  # all calls of all ranks
    formula: str
    axis: str = ""


@dataclass(slots=True)
class Own:
    """What one rank calls, and hands in, of one kind at one place: its share, where summands are counted by the group.

    `axis`: along which.
    """

    calls: int
    share: Fraction
    formula: str
    axis: str


def own_traffic(model: LayeredModel, work: Work) -> dict[Key, Own]:
    """This rank's part of the closed form, from its own layers and what has gone through them.

    One rank alone calls its collectives like any other; along an axis of one rank among several nobody calls any.
    """
    table: dict[Key, Own] = {}
    mesh = model.site.mesh
    with in_whole_shapes(model.layers):
        sends = [(name, layer.sends()) for name, layer in walk(model.all_layers())]
    for name, own in sends:
        for send in (each for each in own if mesh.sizes[each.axis] > 1 or mesh.world.size == 1):
            passes, tokens = work.of(name, send.phase)
            item = wide_dtype(model.dtype).itemsize if send.is_wide else model.dtype.itemsize
            item = INDEX_BYTES if send.is_index else item
            size = Fraction(send.calls * (tokens * send.width * item + passes * send.fixed_bytes))
            if send.summands:
                size = size * send.summands / mesh.sizes[send.axis]
            _add(table, (send.op, folded(name), send.phase), Own(send.calls * passes, size, send.formula, send.axis))
    for op, phase, passes, tokens in _messages(model, work):
        size = Fraction(tokens * model.config.hidden_size * model.dtype.itemsize)
        key = (op, f"runner.{'send' if op == 'send' else 'expect'}", "")
        _add(table, key, Own(passes, size, "t h s", "pp"))
        if model.balance_rule is not None:  # what routers have counted, and backward what it weighs
            numbers = len(model.balance_rule.empty) + (phase == BACKWARD)
            _add(table, key, Own(passes, Fraction(passes * numbers * COUNT_BYTES), "", "pp"))
    return table


def _add(table: dict[Key, Own], key: Key, own: Own) -> None:
    before = table.get(key)
    if before is None and own.calls:
        table[key] = own
    elif before is not None:
        before.calls, before.share = before.calls + own.calls, before.share + own.share


def _messages(model: LayeredModel, work: Work) -> Iterator[tuple[str, str, int, int]]:
    """What a stage of a pipeline sends and receives: op, pass, how often, and the tokens of all of them.

    Forward what comes into its chunks and goes out of them, backward their gradients; not at the ends of the model.
    """
    for chunk in model.chunks if model.site.mesh["pp"].size > 1 and _knows_messages(model) else ():
        first, last = chunk.names[0], chunk.names[-1]
        if first != model.entrance:
            passes, again = forward_passes(model.layers[first], first, work)
            yield "recv", FORWARD, passes, work.ends_of(first, FORWARD)[0] - again
            yield "send", BACKWARD, work.of(first, BACKWARD)[0], work.ends_of(first, BACKWARD)[1]
        if not chunk.ends_in_loss:
            passes, again = forward_passes(model.layers[last], last, work)
            yield "send", FORWARD, passes, work.ends_of(last, FORWARD)[1] - again
            yield "recv", BACKWARD, work.of(last, BACKWARD)[0], work.ends_of(last, BACKWARD)[0]
        if isinstance(model, EncoderDecoder):
            yield from _memories(model, chunk, work)


def _knows_messages(model: LayeredModel) -> bool:
    """Whether every stage that is handed an encoder's output has a block that reads it, which tells its rows."""
    is_alone = not isinstance(model, EncoderDecoder)
    return is_alone or any(name.startswith("blocks.") for name in model.stage_layers[-1])


def _memories(model: EncoderDecoder, chunk: Chunk, work: Work) -> Iterator[tuple[str, str, int, int]]:
    """The encoder's output and its gradient, beside what goes into a chunk of the decoder and comes out of it."""
    block = next((name for name in model.layers if name.startswith("blocks.")), "")
    passes, again = forward_passes(model.layers[block], block, work) if block else (0, 0)
    rows, back = work.ends_of(f"{block}.cross.kv", FORWARD)[0], work.ends_of(f"{block}.cross.kv", BACKWARD)[1]
    forward, backward = (passes, rows - (back if again else 0)), (work.of(block, BACKWARD)[0], back)
    if takes_memory(chunk):
        yield "recv", FORWARD, *forward
        yield "send", BACKWARD, *backward
    if gives_memory(chunk):
        yield "send", FORWARD, *forward
        yield "recv", BACKWARD, *backward


def forward_passes(layer: Layer, name: str, work: Work) -> tuple[int, int]:
    """Forward passes through a layer of the model, without those that backward has made again; the tokens of these."""
    passes, tokens = work.of(name, FORWARD)[0], 0
    while isinstance(layer, Wrapper):
        if isinstance(layer, Recompute):
            again = work.of(name, BACKWARD)
            passes, tokens = passes - again[0], tokens + again[1]
        layer = layer.inner
    return passes, tokens


def expected_traffic(model: LayeredModel, work: Work, everyones: Sequence[Mapping[Key, Own]]) -> dict[Key, Expected]:
    """The closed form of all traffic, from every rank's `own_traffic`; `model` and `work`: the first rank's."""
    table: dict[Key, Expected] = {}
    for key in dict.fromkeys(key for own in everyones for key in own):
        parts = [own[key] for own in everyones if key in own]
        size = sum((part.share for part in parts), start=Fraction(0))
        calls = max(part.calls for part in parts)
        table[key] = Expected(calls, int(size), parts[0].formula, parts[0].axis)
    return table | _generation(model, work)


def letters(model: LayeredModel, work: Work) -> dict[str, float]:
    """What the letters of the formulas stand for; t, and b of generating passes, are means of the forward ones. Where
    there is an encoder beside a decoder, t are the source's tokens, and those of the target are told beside.
    """
    config = model.config
    rows = {"t": _mean(work, model.entrance)}
    rows |= {"t of targets": _mean(work, EMBEDDING)} if isinstance(model, EncoderDecoder) else {}
    rows |= {"b": _mean(work, HEAD)} if _generation(model, work) else {}
    outputs = len(config.labels) if isinstance(config, VisionConfig) else config.vocab_size
    sizes = {"h": config.hidden_size, "d": config.head_dim, "v": outputs}
    return {**rows, **sizes, "p": model.site.tp.size, "s": model.dtype.itemsize}


def _mean(work: Work, name: str) -> float:
    """Tokens of a forward pass through a layer."""
    passes, tokens = work.of(name, FORWARD)
    return tokens / max(passes, 1)


def _generation(model: LayeredModel, work: Work) -> dict[Key, Expected]:
    """Gathered logits: of the passes that went through the head and not on to a loss."""
    (head_passes, head_rows), (loss_passes, loss_rows) = work.of(HEAD, FORWARD), work.of("loss", FORWARD)
    passes, rows = head_passes - loss_passes, head_rows - loss_rows
    if not passes:
        return {}
    assert isinstance(model, CausalLM | EncoderDecoder), "the others' heads end in a loss"
    logits = rows * model.config.vocab_size * model.dtype.itemsize
    return {
        ("all_gather", "layered.gather_logits", ""): Expected(passes, logits, "b v s / p"),
    }


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
