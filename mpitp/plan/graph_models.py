"""The models whose graph is drawn: decoders, encoders and vision transformers, as a run file has them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mpitp.backend.device import AbstractDevice
from mpitp.checkpoint.encoder_source import EncoderSource
from mpitp.checkpoint.load import ModelSource
from mpitp.comm.mesh import abstract_mesh
from mpitp.config import RunConfig
from mpitp.errors import ConfigError
from mpitp.files import read_json
from mpitp.layers.layer import Layer
from mpitp.layers.rows import Rows
from mpitp.models import encoder, registry, vision
from mpitp.models.any_config import AnyConfig
from mpitp.models.config import DecoderConfig
from mpitp.models.encoder_config import CLASSIFICATION, FEATURES, MASKED, TOKENS, EncoderConfig
from mpitp.models.encoders import encoder_config_from_hf
from mpitp.models.layered import LayeredModel
from mpitp.models.vision_config import VisionConfig
from mpitp.train.encoder_task import with_dropouts
from mpitp.train.image_task import base_config
from mpitp.train.kinds import ENCODER_TASKS
from mpitp.train.setup import model_config, open_data, run_cutting, run_source, site_on

GraphSource = ModelSource | EncoderSource
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
    named = config.model.from_ or config.model.config
    if named is None:
        return encoder_config_from_hf(config.model.fields, own=config.model.fields)
    path = Path(named)
    return encoder_config_from_hf(read_json(path / "config.json" if path.is_dir() else path))


def source_of(config: RunConfig, model: AnyConfig) -> GraphSource:
    """The run's model, to be made on a site. One that gives features alone has nothing to learn from: it gets a head
    of two classes. Raises ConfigError for an encoder with a decoder.
    """
    if isinstance(model, DecoderConfig):
        return run_source(config, model)
    if not isinstance(model, EncoderConfig | VisionConfig):
        raise ConfigError(f"plan graph draws models of one stream of tokens, and a {model.model_type} has two")
    headed = model.with_head(CLASSIFICATION, TWO_CLASSES) if model.head == FEATURES else model
    directory = None if config.model.from_ is None else Path(config.model.from_)
    return EncoderSource(
        headed, directory, config.train.seed, cutting=run_cutting(config), recompute=config.train.recompute
    )


def whole_model(config: RunConfig, source: GraphSource, sizes: Mapping[str, int], tp_rank: int) -> LayeredModel:
    """All layers as the first rank along every axis but tp has them, recomputing as the run file says."""
    mesh = abstract_mesh({**sizes, "pp": 1}, tp_rank)
    model = source.abstract(site_on(config, source.config, mesh, AbstractDevice()))
    return registry.recompute_blocks(model, source.recompute)


def layer_costs(model: AnyConfig, layers: Mapping[str, Layer]) -> dict[str, float]:
    """What each layer costs where a model is cut into stages."""
    if isinstance(model, VisionConfig):
        return vision.layer_costs(model, layers)
    if isinstance(model, EncoderConfig):
        return encoder.layer_costs(model, layers)
    assert isinstance(model, DecoderConfig), f"no stages of a {model.model_type}"
    return registry.layer_costs(model, layers)


def tokens_of(config: RunConfig, model: AnyConfig) -> int:
    """Of a sequence: an image's patches and its class token."""
    return 1 + model.grid[0] * model.grid[1] if isinstance(model, VisionConfig) else config.data.seq_len


def rows_of(config: RunConfig, model: AnyConfig) -> Rows:
    """Those of a microbatch."""
    return Rows.of((tokens_of(config, model),) * config.train.micro_batch_size)
