"""What a run learns and from what: its model's config and weights, its batches by number, and how it is judged.

`TextTask` is the next token of prepared text; `encoder_task.py` has those of encoders.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from mpitp.comm.group import Group
from mpitp.config import RunConfig
from mpitp.layers.site import Site
from mpitp.models.any_config import AnyConfig
from mpitp.models.batch import Batch
from mpitp.models.config import DecoderConfig
from mpitp.models.ends import notices_of
from mpitp.models.layered import LayeredModel
from mpitp.train.deal import Deal
from mpitp.train.setup import RunData, check_texts, held_out_batches, model_name, run_notices, run_source, step_batches
from mpitp.train.stages import Cuttable
from mpitp.train.step import TrainStep


class Source(Cuttable, Protocol):
    """A model with its first weights, to be made on any site."""

    def make(self, site: Site) -> LayeredModel:
        """The model on `site`, a collective over its ranks."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What held-out data came to: the mean loss, and where it is a choice, the part of right ones; where it is one of
    whole texts, the part of those that are right from beginning to end; of words, the F1 of their labels.
    """

    loss: float
    accuracy: float | None = None
    exact: float | None = None
    f1: float | None = None

    def measures(self) -> dict[str, float]:
        """What there is of them, by name."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if value is not None}

    def told(self) -> str:
        """In words: "held-out loss 2.1034, accuracy 0.5000"."""
        words = {"loss": "held-out loss", "f1": "F1"}
        return ", ".join(f"{words.get(name, name)} {value:.4f}" for name, value in self.measures().items())


class Task(ABC):
    """One kind of learning, its data open and checked."""

    model_config: AnyConfig
    has_valid: bool
    files: Mapping[str, bytes]  # that go beside the model: its tokenizer's
    sha256: str  # of the data

    @property
    @abstractmethod
    def source(self) -> Source:
        """The run's model with loaded or fresh weights."""

    @abstractmethod
    def notices(self) -> Sequence[str]:
        """What is worth knowing about model and data."""

    @abstractmethod
    def check(self, world: Group) -> None:
        """Raise FileError on all ranks where the data aren't what they should be. A collective."""

    @abstractmethod
    def step_batches(self, step: int, deal: Deal) -> list[Batch]:
        """This rank's microbatches of optimizer step `step`, from 1."""

    @abstractmethod
    def held_out_batches(self, deal: Deal) -> Iterator[Batch]:
        """This rank's microbatches of held-out data, each made when it is due."""

    @abstractmethod
    def judge(self, step: TrainStep, batches: Iterable[Batch]) -> Judgement:
        """How good the model is on held-out batches. A collective over its ranks."""

    def generation_config(self) -> dict[str, Any]:
        """What the saved model's generation_config.json says beside the ids that begin and end a text."""
        return {}


class TextTask(Task):
    """The next token of prepared text."""

    def __init__(self, config: RunConfig, decoder: DecoderConfig, data: RunData) -> None:
        self.config, self.decoder, self.data = config, decoder, data
        self.model_config, self.has_valid = decoder, data.valid is not None
        self.files, self.sha256 = data.tokenizer.files, data.train.tokens.manifest.sha256

    @property
    def source(self) -> Source:
        return run_source(self.config, self.decoder)

    def notices(self) -> Sequence[str]:
        return [*notices_of(self.decoder), *run_notices(self.config, self.data)]

    def check(self, world: Group) -> None:
        check_texts(world, self.data, self.decoder.vocab_size, model_name(self.config))

    def step_batches(self, step: int, deal: Deal) -> list[Batch]:
        return step_batches(self.config, self.decoder, self.data.train, step, deal)

    def held_out_batches(self, deal: Deal) -> Iterator[Batch]:
        assert self.data.valid is not None, "asked for where there is one"
        return held_out_batches(self.config, self.data.valid, deal)

    def judge(self, step: TrainStep, batches: Iterable[Batch]) -> Judgement:
        return Judgement(step.evaluate(batches))
