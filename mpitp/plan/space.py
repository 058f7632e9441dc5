"""All layouts that a model and a step allow on so many ranks: the rules, and the numbers that break them.

    tp <= query heads                    a rank has a head at least
    pp chunks <= blocks                  a part of the pipeline has a block at least
    2 cp <= tokens of a sequence         two pieces a rank
    micro divides the step's sequences   M = sequences / micro
    ep <= experts                        a rank has an expert at least; models without them have ep = 1
    dp ep <= M, and dp ep pp <= M        a microbatch for each replica, for each stage of it
    interleaved: dp ep pp divides M      whole rounds
    ZeRO: dp ep cp > 1; ZeRO-3 beside pp: dp ep divides M, and not with zb

Any number of ranks is cut into these axes exactly; chunks go to `MOST_CHUNKS`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mpitp.errors import ConfigError
from mpitp.models.encoder_decoder_config import EncoderDecoderConfig
from mpitp.plan.layout import Layout
from mpitp.plan.planned_models import PlannedConfig

MOST_CHUNKS = 4
RECOMPUTES = ("none", "attention", "every:2", "full")


@dataclass(frozen=True, slots=True)
class Units:
    """What there is to be dealt."""

    heads: int
    blocks: int
    tokens: int
    sequences: int
    experts: int = 1

    @classmethod
    def of(cls, model: PlannedConfig, seq_len: int, sequences: int) -> Units:
        """Of a model and a step. Experts with a capacity, and cross attention, take whole sequences."""
        if isinstance(model, EncoderDecoderConfig):
            blocks = model.encoder.num_layers + model.decoder.num_layers
            return cls(model.heads, blocks, 1, sequences)
        mixture = model.traits.mixture
        tokens = 1 if mixture is not None and mixture.capacity else seq_len
        experts = mixture.num_experts if mixture is not None else 1
        return cls(model.heads, model.num_layers, tokens, sequences, experts)

    @property
    def most(self) -> dict[str, int]:
        """Ranks that each axis can have."""
        pieces = max(1, self.tokens // 2)
        return {"tp": self.heads, "pp": self.blocks, "cp": pieces, "dp": self.sequences, "ep": self.experts}


def divisors(number: int) -> list[int]:
    """In order."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def axes_of(units: Units, ranks: int) -> Iterator[Layout]:
    """Every way to cut the ranks that the units allow."""
    for tp in divisors(ranks):
        for pp in divisors(ranks // tp) if tp <= units.heads else ():
            for cp in divisors(ranks // tp // pp) if pp <= units.blocks else ():
                deals = ranks // tp // pp // cp
                if (cp == 1 or 2 * cp <= units.tokens) and deals * pp <= units.sequences:
                    for ep in divisors(deals):
                        if ep <= units.experts:
                            yield Layout(pp, deals // ep, cp, tp, ep=ep)


def cuts_of(units: Units, ranks: int) -> Iterator[Layout]:
    """Axes, microbatch and sequence parallelism: what decides how a microbatch is cut."""
    for axes in axes_of(units, ranks):
        for micro in divisors(units.sequences):
            if axes.deals * axes.pp <= units.sequences // micro:
                for sequence_parallel in (False, True)[: 1 + (axes.tp > 1)]:
                    yield replace(axes, sequence_parallel=sequence_parallel, micro=micro)


def schedules_of(units: Units, cut: Layout) -> Iterator[Layout]:
    """In which order stages compute."""
    if cut.pp == 1:
        yield cut
        return
    yield from (replace(cut, schedule=schedule) for schedule in ("1f1b", "gpipe", "zb"))
    if units.sequences // cut.micro % (cut.deals * cut.pp) == 0:
        most = min(MOST_CHUNKS, units.blocks // cut.pp)
        yield from (replace(cut, schedule="interleaved", chunks=chunks) for chunks in range(2, most + 1))


def zeros_of(units: Units, layout: Layout) -> list[int]:
    """Levels of ZeRO that work beside the rest."""
    if layout.replicas == 1:
        return [0]
    alike = units.sequences // layout.micro % layout.deals == 0 and layout.schedule != "zb"
    return [0, 1, 2, 3] if layout.pp == 1 or alike else [0, 1, 2]


def layouts_of(units: Units, ranks: int) -> Iterator[Layout]:
    """All of them, one by one; `search.py` looks at the same ones in groups."""
    for cut in cuts_of(units, ranks):
        for scheduled in schedules_of(units, cut):
            for recompute in RECOMPUTES:
                for zero in zeros_of(units, scheduled):
                    yield replace(scheduled, recompute=recompute, zero=zero)


def check_layout(units: Units, layout: Layout) -> None:
    """Raise ConfigError for a layout that the model or the step has too few units for, with the arithmetic."""
    named = {"tp": "query heads", "pp": "blocks", "cp": "pairs of pieces of a sequence", "dp": "sequences of a step"}
    named["ep"] = "experts"
    replicas = f"dp={layout.dp}" + (f" x ep={layout.ep}" if layout.ep > 1 else "")
    for axis, most in units.most.items():
        if getattr(layout, axis) > max(most, 1):
            raise ConfigError(f"{axis}={getattr(layout, axis)} is more than there are {named[axis]}: {most}")
    if layout.pp * layout.chunks > units.blocks:
        raise ConfigError(
            f"pp={layout.pp} x chunks={layout.chunks} = {layout.pp * layout.chunks} parts of a block at least, "
            f"but the model has {units.blocks}"
        )
    count, left = divmod(units.sequences, layout.micro)
    if left:
        raise ConfigError(f"micro={layout.micro} doesn't divide the step's {units.sequences} sequences")
    if layout.deals * layout.pp > count:
        raise ConfigError(
            f"{units.sequences} sequences / micro={layout.micro} = {count} microbatches, but {replicas} x "
            f"pp={layout.pp} = {layout.deals * layout.pp} take one each at least"
        )
    if layout.pp > 1 and layout.schedule == "interleaved" and count % (layout.deals * layout.pp):
        raise ConfigError(
            f"interleaved takes whole rounds: {count} microbatches aren't a multiple of {replicas} x pp={layout.pp}"
        )
    if layout.zero not in zeros_of(units, layout):
        raise ConfigError(f"zero={layout.zero} doesn't go with {replace(layout, zero=0)}")


def check_ranks(units: Units, ranks: int) -> None:
    """Raise ConfigError where so many ranks can't be cut into the axes at all, with the arithmetic."""
    if next(axes_of(units, ranks), None) is not None:
        return
    most = units.most
    below = next(n for n in range(ranks - 1, 0, -1) if next(axes_of(units, n), None))
    above = next((n for n in range(ranks + 1, 2 * ranks) if next(axes_of(units, n), None)), None)
    raise ConfigError(
        f"{ranks} ranks can't be cut into axes: tp goes to {most['tp']} (query heads), pp to {most['pp']} (blocks), cp "
        f"to {most['cp']} ({units.tokens} tokens / 2), and dp x pp to {units.sequences} (sequences of a step); "
        f"{below}{f' or {above}' if above else ''} ranks can"
    )
