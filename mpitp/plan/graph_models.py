"""The models whose graph is drawn, of every kind, as a run file has them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpitp.backend.device import AbstractDevice
from mpitp.checkpoint.encoder_decoder import EncoderDecoderSource
from mpitp.checkpoint.encoder_source import EncoderSource
from mpitp.checkpoint.load import ModelSource
from mpitp.comm.mesh import abstract_mesh
from mpitp.config import RunConfig
from mpitp.files import read_json
from mpitp.layers.layer import Layer
from mpitp.layers.rows import Rows
from mpitp.models import encoder, encoder_decoders, registry, vision
from mpitp.models.any_config import AnyConfig
from mpitp.models.config import DecoderConfig
from mpitp.models.encoder_config import CLASSIFICATION, FEATURES, MASKED, TOKENS, EncoderConfig
from mpitp.models.encoder_decoder import EncoderDecoder
from mpitp.models.encoder_decoder_config import EncoderDecoderConfig
from mpitp.models.encoder_decoders import encoder_decoder_config_from_hf, recompute_both
from mpitp.models.encoders import encoder_config_from_hf
from mpitp.models.layered import LayeredModel
from mpitp.models.vision_config import VisionConfig
from mpitp.plan.planned_models import refuse_cut_sources
from mpitp.train.encoder_task import with_dropouts
from mpitp.train.image_task import base_config
from mpitp.train.kinds import ENCODER_TASKS
from mpitp.train.pair_task import PairTask, pair_dropouts
from mpitp.train.setup import model_config, open_data, run_cutting, run_source, site_on

GraphSource = ModelSource | EncoderSource | EncoderDecoderSource
TWO_CLASSES = ("LABEL_0", "LABEL_1")
KINDS = {  # what a run teaches an encoder with this head
    FEATURES: "classification",
    CLASSIFICATION: "classification",
    MASKED: "masked",
    TOKENS: "token-classification",
}


def config_of(config: RunConfig) -> AnyConfig:
    """The model of a run, whose data need not be there where the model says by itself what it chooses from."""
    kind, is_there = config.task.kind, Path(config.data.train).exists()
    if kind == "text":
        return model_config(config, open_data(config) if is_there else None)
    if kind == "translation":
        return PairTask(config).model_config if is_there else _pair_config(config)
    if is_there:
        return ENCODER_TASKS[kind](config).source.config
    if kind == "image":
        return base_config(config)
    own = with_dropouts(config, _encoder_config(config))
    if KINDS[own.head] == kind:
        return own
    head = next(head for head, taught in KINDS.items() if taught == kind and head != FEATURES)
    return own.with_head(head, () if head == MASKED else TWO_CLASSES)


def _encoder_config(config: RunConfig) -> EncoderConfig:
    """As its file has it, or the run file's own fields."""
    raw, own = _raw(config)
    return encoder_config_from_hf(raw, own)


def _pair_config(config: RunConfig) -> EncoderDecoderConfig:
    raw, own = _raw(config)
    found = encoder_decoder_config_from_hf(raw, own)
    return replace(found, dropouts=pair_dropouts(found.dropouts, config.model.dropout))


def _raw(config: RunConfig) -> tuple[Mapping[str, Any], Collection[str]]:
    """A parsed config.json, and the keys of it that the run file has itself."""
    named = config.model.from_ or config.model.config
    if named is None:
        return config.model.fields, config.model.fields
    path = Path(named)
    return read_json(path / "config.json" if path.is_dir() else path), ()


def source_of(config: RunConfig, model: AnyConfig) -> GraphSource:
    """The run's model, to be made on a site. One that gives features alone has nothing to learn from: it gets a head
    of two classes.
    """
    if isinstance(model, DecoderConfig):
        return run_source(config, model)
    directory, seed = None if config.model.from_ is None else Path(config.model.from_), config.train.seed
    refuse_cut_sources(model, config.mesh.cp)
    how: dict[str, Any] = {"cutting": run_cutting(config), "recompute": config.train.recompute}
    if isinstance(model, EncoderDecoderConfig):
        return EncoderDecoderSource(model, directory, seed, **how)
    assert isinstance(model, EncoderConfig | VisionConfig), f"no model of a {type(model).__name__}"
    headed = model.with_head(CLASSIFICATION, TWO_CLASSES) if model.head == FEATURES else model
    return EncoderSource(headed, directory, seed, **how)


def whole_model(config: RunConfig, source: GraphSource, sizes: Mapping[str, int], tp_rank: int) -> LayeredModel:
    """All layers as the first rank along every axis but tp has them, recomputing as the run file says."""
    mesh = abstract_mesh({**sizes, "pp": 1}, tp_rank)
    model = source.abstract(site_on(config, source.config, mesh, AbstractDevice()))
    if isinstance(model, EncoderDecoder):
        return recompute_both(model, source.recompute)
    return registry.recompute_blocks(model, source.recompute)


def layer_costs(model: AnyConfig, layers: Mapping[str, Layer]) -> dict[str, float]:
    """What each layer costs where a model is cut into stages."""
    if isinstance(model, VisionConfig):
        return vision.layer_costs(model, layers)
    if isinstance(model, EncoderConfig):
        return encoder.layer_costs(model, layers)
    if isinstance(model, EncoderDecoderConfig):
        return encoder_decoders.layer_costs(model, layers)
    assert isinstance(model, DecoderConfig), f"no stages of a {model.model_type}"
    return registry.layer_costs(model, layers)


def tokens_of(config: RunConfig, model: AnyConfig) -> int:
    """Of a sequence: an image's patches and its class token."""
    return 1 + model.grid[0] * model.grid[1] if isinstance(model, VisionConfig) else config.data.seq_len


def rows_of(config: RunConfig, model: AnyConfig) -> Rows:
    """Those of a microbatch."""
    return Rows.of((tokens_of(config, model),) * config.train.micro_batch_size)
