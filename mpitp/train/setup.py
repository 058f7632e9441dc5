"""Puts together what a run file names: data, tokenizer, model, optimizer; checked before anything is computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mpitp.backend.device import Device
from mpitp.checkpoint.load import ModelSource, load_config
from mpitp.checkpoint.together import gather_together, together
from mpitp.comm.group import Group
from mpitp.comm.mesh import Mesh, make_mesh
from mpitp.comm.own_group import check_group, load_group
from mpitp.config import DropoutSection, RunConfig
from mpitp.data.sampler import Sampler
from mpitp.data.token_file import TokenFile
from mpitp.data.tokenizer import OWN_FIELDS, Tokenizer, without_row
from mpitp.errors import ConfigError
from mpitp.layers.passes import DropoutState
from mpitp.layers.site import Site, choose_blocks, make_site
from mpitp.models.any_config import AnyConfig
from mpitp.models.batch import Batch
from mpitp.models.config import DecoderConfig, Dropouts
from mpitp.models.ends import TOKENIZER, with_ends
from mpitp.models.layered import LayeredModel
from mpitp.models.registry import config_from_hf
from mpitp.models.stages import Cutting
from mpitp.optim.adamw import AdamWSettings
from mpitp.optim.dealt_weights import WithDealtWeights
from mpitp.optim.reduction import Reduction, make_reduction
from mpitp.optim.schedule import Schedule
from mpitp.train.deal import ALONE, Deal
from mpitp.train.named_model import named_config


@dataclass(frozen=True, slots=True)
class RunData:
    """The prepared text of a run: training samples, held-out samples (or None), and their tokenizer."""

    train: Sampler
    valid: Sampler | None
    tokenizer: Tokenizer

    @property
    def vocab_size(self) -> int:
        """Of the tokenizer that the text was prepared with."""
        return self.train.tokens.manifest.vocab_size


def open_data(config: RunConfig) -> RunData:
    """Open the token files. Raises FileError for what is damaged, ConfigError for texts of different tokenizers."""
    data = config.data
    tokens = TokenFile(data.train)
    train = Sampler(tokens, data.seq_len, config.train.seed)
    if data.valid is None:
        return RunData(train, None, tokens.load_tokenizer())
    held_out = TokenFile(data.valid)
    if held_out.manifest.tokenizer_sha256 != tokens.manifest.tokenizer_sha256:
        raise ConfigError(f"{data.train} and {data.valid} were prepared with different tokenizers")
    return RunData(train, Sampler(held_out, data.seq_len, seed=None), tokens.load_tokenizer())


def check_texts(group: Group, data: RunData, vocab_size: int, where: str) -> None:
    """Raise FileError on all ranks where a token file isn't what its manifest says, or holds a token that the model
    `where` with `vocab_size` rows has none for. A collective.

    The ranks that see the same file share the reading; a copy on a disk of a node's own is read by that node's ranks.
    """
    for sampler in (data.train, data.valid):
        if sampler is not None:
            tokens = sampler.tokens
            seen = gather_together(group, tokens.identity)
            alike = [rank for rank, identity in enumerate(seen) if identity == seen[group.rank]]
            share = alike.index(group.rank), len(alike)
            together(group, partial(tokens.check_share, *share))
            if data.vocab_size > vocab_size:
                together(group, partial(_check_rows, sampler, data.tokenizer, share, vocab_size, where))


def _check_rows(sampler: Sampler, tokenizer: Tokenizer, share: tuple[int, int], vocab_size: int, where: str) -> None:
    """Raise ConfigError where one of some shares of a token file has a token without a row."""
    tokens = sampler.tokens
    largest = max((int(ids.max()) for ids in tokens.shares(*share)), default=-1)
    if largest >= vocab_size:
        raise ConfigError(f"{tokens.path} has {without_row(tokenizer, largest, vocab_size, where)}")


def model_config(config: RunConfig, data: RunData | None) -> DecoderConfig:
    """The model's config: of the directory to start from, of a config.json, or of the run file's own fields.

    `data` None: the text isn't there yet; what it decides must be told, and isn't checked.
    """
    decoder = named_config(config.model, load_config, config_from_hf, _known_fields(data))
    decoder = dataclasses.replace(decoder, dropouts=dropouts_of(decoder.dropouts, config.model.dropout))
    if decoder.grouping is not None:
        raise ConfigError(
            f"the model's weights are rounded to {decoder.grouping.bits} bits: they can't be trained; "
            "train the model in floats, and round the result (mpitp convert --weights)"
        )
    if data is not None and data.tokenizer.own_size > decoder.vocab_size:
        raise ConfigError(
            f"the text was prepared with a vocabulary of {data.tokenizer.own_size}, the model has "
            f"{decoder.vocab_size}; prepare it with the model's own tokenizer: mpitp data prepare --tokenizer DIR"
        )
    if config.data.seq_len > decoder.max_positions:
        raise ConfigError(
            f"data.seq_len={config.data.seq_len} exceeds the model's {decoder.key('max_positions')}="
            f"{decoder.max_positions}; lower it or choose a model with more positions"
        )
    return decoder if data is None else with_ends(decoder, TOKENIZER, data.tokenizer.eos_ids)


def model_name(config: RunConfig) -> str:
    """What messages call the model of a run file."""
    return config.model.from_ or config.model.config or OWN_FIELDS


def run_mesh(config: RunConfig, world: Group) -> Mesh:
    """The mesh that the run file asks for. Raises ConfigError when the job has another number of ranks."""
    wrap = load_group(config.mesh.group) if config.mesh.group else None
    return make_mesh(world, mesh_sizes(config), wrap, config.mesh.weights)


def check_own_group(config: RunConfig, world: Group) -> None:
    """Compare the run's own group, where it has one, with the library's. A collective; raises NumericError."""
    if config.mesh.group:
        wrap = together(world, lambda: load_group(config.mesh.group))
        check_group(wrap, world, f"mesh.group = {config.mesh.group}")


def mesh_sizes(config: RunConfig) -> dict[str, int]:
    """The axes of the run file."""
    return {axis: getattr(config.mesh, axis) for axis in ("pp", "dp", "ep", "cp", "tp")}


def run_site(config: RunConfig, decoder: AnyConfig, world: Group, device: Device) -> Site:
    """What the run file lays its model on."""
    return site_on(config, decoder, run_mesh(config, world), device)


def site_on(config: RunConfig, decoder: AnyConfig, mesh: Mesh, device: Device) -> Site:
    """The same on a mesh."""
    blocks = choose_blocks(config.train.invariant, config.train.invariant_blocks, decoder.heads)
    return make_site(
        mesh,
        dtype=config.model.dtype,
        device=device,
        invariant_blocks=blocks,
        sequence_parallel=config.mesh.sequence_parallel,
        cp_form=config.mesh.cp_form,
    )


def run_source(config: RunConfig, decoder: DecoderConfig) -> ModelSource:
    """The run's model with loaded or fresh weights, to be made on a site."""
    directory = None if config.model.from_ is None else Path(config.model.from_)
    return ModelSource(
        decoder,
        directory,
        config.train.seed,
        cutting=run_cutting(config),
        deals_weights=config.optim.zero == 3,
        recompute=config.train.recompute,
    )


def run_cutting(config: RunConfig) -> Cutting:
    """How the run file cuts its model into stages."""
    return Cutting(config.mesh.num_chunks, config.mesh.stages)


def run_reduction(config: RunConfig, model: LayeredModel) -> Reduction:
    """How the gradients of the run's replicas become one."""
    if config.optim.zero == 3:
        return WithDealtWeights(model)
    return make_reduction(model, config.optim.zero, int(config.optim.bucket_mib * (1 << 20)))


def step_batches(
    config: RunConfig, decoder: DecoderConfig, sampler: Sampler, step: int, deal: Deal = ALONE
) -> list[Batch]:
    """This rank's microbatches of optimizer step `step` (from 1). All ranks' together hold samples (step-1) * global
    batch size and on, each once.
    """
    size, micro = config.global_batch_size, config.train.micro_batch_size
    has_dropout = any(dataclasses.astuple(decoder.dropouts))
    batches = []
    for number in deal.of(num_microbatches(config)):
        places = range(number * micro, min((number + 1) * micro, size))
        state = DropoutState(config.train.seed, step) if has_dropout else None
        tokens, targets = sampler.batch([(step - 1) * size + place for place in places])
        batches.append(Batch.of_rows(tokens, targets, state, samples=places).cut(*deal.piece))
    return batches


def num_microbatches(config: RunConfig) -> int:
    """Of a step, on all ranks together."""
    return -(-config.global_batch_size // config.train.micro_batch_size)


def held_out_batches(config: RunConfig, sampler: Sampler, deal: Deal = ALONE) -> Iterator[Batch]:
    """This rank's of the first `valid_sequences` windows of the held-out text (0: all), in microbatches, each made when
    it is due.
    """
    wanted = config.data.valid_sequences or sampler.num_windows
    samples, micro = range(min(wanted, sampler.num_windows)), config.train.micro_batch_size
    for number in deal.of(-(-len(samples) // micro)):
        yield Batch.of_rows(*sampler.batch(samples[number * micro : (number + 1) * micro])).cut(*deal.piece)


def run_notices(config: RunConfig, data: RunData) -> list[str]:
    """Lines on what would make a user wonder about the numbers of a run that is otherwise in order."""
    lines = []
    size, windows, steps = config.global_batch_size, data.train.num_windows, config.train.steps
    if windows < size:
        lines.append(
            f"a step takes {size} sequences, but {config.data.train} has only {windows} of data.seq_len="
            f"{config.data.seq_len} tokens: a step shows each about {size / windows:.3g} times, and {steps} steps are "
            f"{steps * size / windows:.3g} epochs"
        )
    if num_microbatches(config) < config.mesh.replicas:
        lines.append(
            f"a step has {num_microbatches(config)} microbatches for mesh.{_replicas(config)} replicas: the others "
            "have nothing to do; a smaller train.micro_batch_size or a larger train.global_batch_size gives them work"
        )
    if config.optim.warmup_steps > steps:
        lines.append(
            f"optim.warmup_steps={config.optim.warmup_steps} is more than train.steps={steps}: the learning rate ends "
            f"at {schedule(config).at(steps):.3g}, and optim.lr={config.optim.lr:.3g} is never reached"
        )
    return lines


def _replicas(config: RunConfig) -> str:
    """The axes of replicas, for a message."""
    mesh = config.mesh
    return f"dp={mesh.dp}" if mesh.ep == 1 else f"dp={mesh.dp} times mesh.ep={mesh.ep}"


def optimizer_settings(config: RunConfig) -> AdamWSettings:
    """AdamW as the run file says."""
    return AdamWSettings(config.optim.betas, config.optim.eps, config.optim.weight_decay)


def schedule(config: RunConfig) -> Schedule:
    """The learning rate as the run file says."""
    optim = config.optim
    return Schedule(optim.lr, config.train.steps, optim.warmup_steps, optim.schedule, optim.min_lr)


def _known_fields(data: RunData | None) -> dict[str, Any]:
    """What the tokenizer knows of a model: vocabulary size and special tokens."""
    if data is None:
        return {}
    return {
        "vocab_size": data.vocab_size,
        "bos_token_id": data.tokenizer.bos_id,
        "eos_token_id": data.tokenizer.eos_id,
    }


def dropouts_of(model: Dropouts, section: DropoutSection) -> Dropouts:
    """The model's rates, replaced where the run file names one."""
    return Dropouts(
        embedding=model.embedding if section.embd is None else section.embd,
        attention=model.attention if section.attn is None else section.attn,
        residual=model.residual if section.resid is None else section.resid,
    )
