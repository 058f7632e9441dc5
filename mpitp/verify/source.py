"""Where the model and the batch of a verification come from: a model directory, or a run file."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpitp.backend.arrays import array_module
from mpitp.backend.device import Device
from mpitp.backend.rng import normal_rows, stream_key
from mpitp.checkpoint.load import load_blocks, load_config, load_model
from mpitp.comm.group import Group
from mpitp.comm.serial import SerialGroup
from mpitp.config import RunConfig, load_run_config
from mpitp.errors import ConfigError, UsageError
from mpitp.layers.layout import choose_blocks
from mpitp.layers.sequences import DropoutState
from mpitp.models.batch import Batch
from mpitp.models.config import DecoderConfig
from mpitp.models.model import CausalLM
from mpitp.models.registry import build_model, new_model
from mpitp.train.setup import RunData, model_config, open_data, step_batches


@dataclass(frozen=True, slots=True)
class Source:
    """A model that can be made on any group: from `directory`, or fresh from `seed` where that is None."""

    config: DecoderConfig
    directory: Path | None
    seed: int
    dtype: str
    device: Device
    invariant_blocks: int = 0
    layers: range | None = None  # only these blocks

    def make(self, group: Group) -> CausalLM:
        """The model on `group`."""
        config, blocks = self.config, self.invariant_blocks
        if self.directory is None:
            cut = config if self.layers is None else dataclasses.replace(config, num_layers=len(self.layers))
            model = new_model(cut, group, seed=self.seed, dtype=self.dtype, device=self.device, invariant_blocks=blocks)
            shake(model, self.seed)
            return model
        if self.layers is None:
            return load_model(
                self.directory, group, dtype=self.dtype, device=self.device, invariant_blocks=blocks, config=config
            )
        return load_blocks(
            self.directory,
            group,
            self.layers,
            dtype=self.dtype,
            device=self.device,
            invariant_blocks=blocks,
            config=config,
        )

    @property
    def chosen_layers(self) -> range:
        """The blocks of the whole model that this one has."""
        return range(self.config.num_layers) if self.layers is None else self.layers

    def num_elements(self, num_layers: int | None = None) -> int:
        """Elements of all parameters of the model, or of one with so many blocks."""
        config = dataclasses.replace(self.config, num_layers=1)
        model = build_model(config, SerialGroup(), dtype=self.dtype, device=self.device)
        sizes = {name: math.prod(param.spec.shape) for name, param in model.named_params()}
        block = sum(size for name, size in sizes.items() if name.startswith("blocks."))
        return sum(sizes.values()) + ((num_layers or len(self.chosen_layers)) - 1) * block


def source_of(args: SourceArguments, device: Device) -> tuple[Source, Batch]:
    """The model and the batch that the arguments ask for."""
    if args.run_file is not None:
        run = load_run_config(args.run_file, args.overrides)
        data = open_data(run)
        source = _run_source(args, run, data, device)
        batch = step_batches(run, source.config, data.train, step=1)[0]
    else:
        assert args.model is not None
        config = load_config(args.model)
        blocks = choose_blocks(args.invariant, args.invariant_blocks, config.heads)
        source = Source(config, Path(args.model), args.seed, args.dtype, device, blocks)
        batch = random_batch(config, args.batch, args.seq, args.seed)
    return dataclasses.replace(source, layers=parse_layers(args.layers, source.config.num_layers)), batch


@dataclass(frozen=True, slots=True)
class SourceArguments:
    """What the command line says about model and batch; exactly one of `model` and `run_file` is given."""

    model: str | None
    run_file: str | None
    overrides: tuple[str, ...] = ()
    layers: str | None = None
    batch: int = 2
    seq: int = 16
    seed: int = 0
    dtype: str = "float32"
    invariant: bool = False
    invariant_blocks: int = 0


def random_batch(config: DecoderConfig, batch: int, seq: int, seed: int) -> Batch:
    """Random tokens: `batch` sequences of `seq`, with the model's own dropout rates in force."""
    if batch < 1 or seq < 1:
        raise UsageError(f"--batch and --seq must be at least 1, got {batch} and {seq}")
    if seq > config.max_positions:
        raise UsageError(f"--seq {seq} exceeds the model's {config.max_positions} positions; use a smaller one")
    tokens = np.random.default_rng(seed).integers(0, config.vocab_size, (batch, seq + 1))
    has_dropout = any(dataclasses.astuple(config.dropouts))
    state = DropoutState(seed, 1, tuple(range(batch))) if has_dropout else None
    return Batch.of_rows(tokens[:, :-1], tokens[:, 1:], state)


def shake(model: CausalLM, seed: int) -> None:
    """Add a little to what a fresh model begins with as zeros or ones, the same in every layout.

    A bias that is zero hides that it is added twice, a norm's weight of ones that it is another rank's.
    """
    for name, param in model.named_params():
        if param.init_std:
            continue
        for part, rows in param.spec.local_parts():
            key = stream_key(seed, f"verify/{name}/{part.name}")
            shape, dim, dtype = param.spec.global_shape(part), param.spec.dim, param.data.dtype
            noise = normal_rows(shape, dim, part.held, key, dtype, array_module(param.data))
            param.spec.view(param.data, rows)[...] += noise * dtype.type(0.1)


def parse_layers(text: str | None, num_layers: int) -> range | None:
    """Blocks 0 to 3 for "0:4"; either side may be left out."""
    if text is None:
        return None
    start, colon, stop = text.partition(":")
    try:
        chosen = range(int(start or 0), int(stop or num_layers))
    except ValueError:
        chosen = range(0)
    if not colon or not chosen or chosen.start < 0 or chosen.stop > num_layers:
        raise UsageError(f"--layers {text}: expected A:B within 0:{num_layers}, for example 0:{min(4, num_layers)}")
    return chosen


def needed_bytes(source: Source, ranks: int, steps: int, num_layers: int | None = None) -> int:
    """Memory on rank 0: weights, gradients, a record of both, optimizer state and updates; whole and its share."""
    copies = 4 + (3 if steps else 0)
    share = 1 + 1 / ranks
    return int(source.num_elements(num_layers) * np.dtype(source.dtype).itemsize * copies * share)


def check_memory(source: Source, ranks: int, steps: int, available: int | None) -> None:
    """Refuse a model that doesn't fit twice on rank 0. `available` None: not known, nothing is refused."""
    need = needed_bytes(source, ranks, steps)
    if available is None or need <= available:
        return
    first, layers = source.chosen_layers.start, len(source.chosen_layers)
    one = needed_bytes(source, ranks, steps, 1)
    fewer = 1 + int((available - one) * (layers - 1) / (need - one)) if one <= available else 0
    advice = (
        f"check fewer layers at a time: --layers {first}:{first + fewer}"
        if fewer
        else f"not even one layer fits ({one / 2**30:.2f} GiB); use a host with more memory"
    )
    raise ConfigError(
        f"verify needs {need / 2**30:.2f} GiB on rank 0 for its share and the one-rank model, but "
        f"{available / 2**30:.2f} GiB are free; {advice}"
    )


def available_bytes() -> int | None:
    """Free memory of this host, as Linux tells it; None elsewhere."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _run_source(args: SourceArguments, run: RunConfig, data: RunData, device: Device) -> Source:
    config = model_config(run, data)
    invariant, blocks = args.invariant or run.train.invariant, args.invariant_blocks or run.train.invariant_blocks
    directory = None if run.model.from_ is None else Path(run.model.from_)
    return Source(config, directory, run.train.seed, args.dtype, device, choose_blocks(invariant, blocks, config.heads))
