"""Puts together what a run file names: data, tokenizer, model, optimizer; checked before anything is computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpitp.backend.device import Device
from mpitp.checkpoint.load import load_config, load_model
from mpitp.comm.group import Group
from mpitp.comm.mesh import Mesh, make_mesh
from mpitp.config import DropoutSection, RunConfig
from mpitp.data.sampler import Sampler
from mpitp.data.token_file import TokenFile
from mpitp.data.tokenizer import Tokenizer
from mpitp.errors import ConfigError
from mpitp.files import read_json
from mpitp.layers.layout import choose_blocks
from mpitp.layers.sequences import DropoutState
from mpitp.models.batch import Batch
from mpitp.models.config import DecoderConfig, Dropouts
from mpitp.models.model import CausalLM
from mpitp.models.registry import config_from_hf, new_model
from mpitp.optim.adamw import AdamWSettings
from mpitp.optim.schedule import Schedule


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


def model_config(config: RunConfig, data: RunData) -> DecoderConfig:
    """The model's config: of the directory to start from, of a config.json, or of the run file's own fields."""
    section = config.model
    if section.from_ is not None:
        decoder = load_config(section.from_)
    elif section.config is not None:
        decoder = _config_from_file(Path(section.config))
    else:
        decoder = _config_from_fields(section.fields, data)
    decoder = dataclasses.replace(decoder, dropouts=_dropouts(decoder.dropouts, section.dropout))
    if data.vocab_size > decoder.vocab_size:
        raise ConfigError(
            f"the text was prepared with a vocabulary of {data.vocab_size}, the model has {decoder.vocab_size}; "
            "prepare it with the model's own tokenizer: mpitp data prepare --tokenizer DIR"
        )
    if config.data.seq_len > decoder.max_positions:
        raise ConfigError(
            f"data.seq_len={config.data.seq_len} exceeds the model's {decoder.key('max_positions')}="
            f"{decoder.max_positions}; lower it or choose a model with more positions"
        )
    return decoder


def run_mesh(config: RunConfig, world: Group) -> Mesh:
    """The mesh that the run file asks for. Raises ConfigError when the job has another number of ranks."""
    return make_mesh(world, config.mesh.tp, config.mesh.pp, config.mesh.dp, config.mesh.cp)


def make_model(config: RunConfig, decoder: DecoderConfig, world: Group, device: Device) -> CausalLM:
    """The model laid over the run's mesh, with loaded or fresh weights."""
    mesh = run_mesh(config, world)
    blocks = choose_blocks(config.train.invariant, config.train.invariant_blocks, decoder.heads)
    dtype = config.model.dtype
    if config.model.from_ is not None:
        return load_model(
            config.model.from_, mesh.tp, dtype=dtype, device=device, invariant_blocks=blocks, config=decoder
        )
    return new_model(decoder, mesh.tp, seed=config.train.seed, dtype=dtype, device=device, invariant_blocks=blocks)


def step_batches(config: RunConfig, decoder: DecoderConfig, sampler: Sampler, step: int) -> list[Batch]:
    """The microbatches of optimizer step `step` (from 1): samples (step-1) * global batch size and on, each once."""
    size, micro = config.global_batch_size, config.train.micro_batch_size
    has_dropout = any(dataclasses.astuple(decoder.dropouts))
    batches = []
    for first in range(0, size, micro):
        places = range(first, first + micro)
        state = DropoutState(config.train.seed, step, tuple(places)) if has_dropout else None
        batches.append(Batch.of_rows(*sampler.batch([(step - 1) * size + place for place in places]), dropout=state))
    return batches


def held_out_batches(config: RunConfig, sampler: Sampler) -> list[Batch]:
    """The first `valid_sequences` windows of the held-out text (0: all), in microbatches."""
    wanted = config.data.valid_sequences or sampler.num_windows
    samples, micro = range(min(wanted, sampler.num_windows)), config.train.micro_batch_size
    return [Batch.of_rows(*sampler.batch(samples[first : first + micro])) for first in range(0, len(samples), micro)]


def optimizer_settings(config: RunConfig) -> AdamWSettings:
    """AdamW as the run file says."""
    return AdamWSettings(config.optim.betas, config.optim.eps, config.optim.weight_decay)


def schedule(config: RunConfig) -> Schedule:
    """The learning rate as the run file says."""
    optim = config.optim
    return Schedule(optim.lr, config.train.steps, optim.warmup_steps, optim.schedule, optim.min_lr)


def _config_from_file(path: Path) -> DecoderConfig:
    path = path / "config.json" if path.is_dir() else path
    raw = read_json(path)
    try:
        return config_from_hf(raw)
    except ConfigError as error:
        raise ConfigError(str(error).replace("config.json", str(path), 1)) from error


def _config_from_fields(fields: Mapping[str, Any], data: RunData) -> DecoderConfig:
    """The config of the run file's own fields; errors speak of the run file's section."""
    try:
        return config_from_hf(_with_defaults(fields, data))
    except ConfigError as error:
        raise ConfigError(str(error).replace("config.json:", "[model] of the run file:")) from error


def _with_defaults(fields: Mapping[str, Any], data: RunData) -> dict[str, Any]:
    """The run file's fields, with what the tokenizer knows: vocabulary size and special tokens."""
    known = {
        "vocab_size": data.vocab_size,
        "bos_token_id": data.tokenizer.bos_id,
        "eos_token_id": data.tokenizer.eos_id,
    }
    return known | dict(fields)


def _dropouts(model: Dropouts, section: DropoutSection) -> Dropouts:
    """The model's rates, replaced where the run file names one."""
    return Dropouts(
        embedding=model.embedding if section.embd is None else section.embd,
        attention=model.attention if section.attn is None else section.attn,
        residual=model.residual if section.resid is None else section.resid,
    )
