"""The facts of a vision transformer: ViT (Dosovitskiy et al. 2021) and DINOv2 (Oquab et al. 2023)."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mpitp.errors import ConfigError
from mpitp.models.config import MOST, MOST_ELEMENTS, MOST_INIT_STD, MOST_OF_ANY, Dropouts, HfConfigReader, refuse_slips
from mpitp.models.encoder_config import CLASSIFICATION, FEATURES, read_head, read_labels
from mpitp.models.facts import read_activation
from mpitp.models.kinds import is_vision
from mpitp.models.nearest import what_it_is

CLASSES = {
    "vit": {FEATURES: "ViTModel", CLASSIFICATION: "ViTForImageClassification"},
    "dinov2": {FEATURES: "Dinov2Model", CLASSIFICATION: "Dinov2ForImageClassification"},
}
KEYS = {
    "num_layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "ffn_hidden": "intermediate_size",
    "norm_eps": "layer_norm_eps",
    "init_std": "initializer_range",
}
VALUES: dict[str, tuple[Any, ...]] = {
    "compression_config": ({},),
    "drop_path_rate": (0.0,),
    "is_decoder": (False,),
    "pruned_heads": ({},),
    "quantization_config": ({},),
    "use_swiglu_ffn": (False,),
}
# Of backbones, of masked images, and of a pooler that classifiers don't have.
UNUSED = (
    "encoder_stride pooler_output_size pooler_act apply_layernorm reshape_hidden_states use_mask_token stage_names "
    "out_features out_indices"
).split()


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """A vision transformer. `image_size`: of the images that come in; `trained_size`: of those that the position table
    was made for. `hf` is the config.json it was read from.
    """

    model_type: str
    hidden_size: int
    num_layers: int
    heads: int
    ffn_hidden: int
    image_size: int
    trained_size: int
    patch_size: int
    channels: int
    norm_eps: float
    activation: str
    init_std: float
    qkv_bias: bool = True
    layer_scale: float | None = None  # what it begins with; None: there is none
    dropouts: Dropouts = Dropouts()
    head: str = FEATURES
    labels: tuple[str, ...] = ()
    hf: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    notices: tuple[str, ...] = field(default=(), compare=False, repr=False)
    unread: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        names = ("hidden_size", "num_layers", "heads", "ffn_hidden", "image_size", "patch_size", "channels")
        for name in (*names, "trained_size"):
            value, most = getattr(self, name), MOST.get(name, MOST_OF_ANY)
            if not 1 <= value <= most:
                raise ConfigError(f"config.json: {self.key(name)} must lie in 1 .. {most}, got {value!r:.40}")
        if self.hidden_size % self.heads:
            raise ConfigError(
                f"config.json: hidden_size={self.hidden_size} must be a multiple of num_attention_heads={self.heads}"
            )
        for size in (self.image_size, self.trained_size):
            if size // self.patch_size < 1:
                raise ConfigError(f"config.json: image_size={size} is smaller than patch_size={self.patch_size}")
        widths = (self.ffn_hidden, self.channels * self.patch_size**2, (self.trained_size // self.patch_size) ** 2)
        if max(widths) * self.hidden_size > MOST_ELEMENTS:
            raise ConfigError("config.json: its sizes make a matrix beyond any memory")
        if not 0 <= self.norm_eps <= 1 or not 0 <= self.init_std <= MOST_INIT_STD:
            raise ConfigError(
                f"config.json: layer_norm_eps must lie in [0, 1], initializer_range in [0, {MOST_INIT_STD}]"
            )
        if self.head == CLASSIFICATION and len(self.labels) < 2:
            raise ConfigError(f"config.json: a classifier of {len(self.labels)} classes is not supported")

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden_size // self.heads

    @property
    def head_dropout(self) -> float:
        """There is none before the classifier."""
        return 0.0

    @property
    def grid(self) -> tuple[int, int]:
        """Patches of an image, down and across."""
        return self.image_size // self.patch_size, self.image_size // self.patch_size

    @property
    def table_grid(self) -> tuple[int, int]:
        """Patches that the position table is for."""
        return self.trained_size // self.patch_size, self.trained_size // self.patch_size

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Images have no end."""
        return ()

    @property
    def bos_id(self) -> int | None:
        """Nor a beginning."""
        return None

    def key(self, fact: str) -> str:
        """What config.json calls one of these fields."""
        return {**KEYS, "channels": "num_channels", "trained_size": "image_size"}.get(fact, fact)

    def for_size(self, image_size: int) -> VisionConfig:
        """The same model for images of another size: its positions are interpolated."""
        return replace(self, image_size=image_size)

    def with_head(self, head: str, labels: Sequence[str] = ()) -> VisionConfig:
        """The same model under another head; its config.json says so."""
        hf = {key: value for key, value in self.hf.items() if key not in ("num_labels", "id2label", "label2id")}
        hf["architectures"] = [CLASSES[self.model_type][head]]
        if labels:
            hf |= {"id2label": {str(i): name for i, name in enumerate(labels)}}
            hf |= {"label2id": {name: i for i, name in enumerate(labels)}}
        return dataclasses.replace(self, head=head, labels=tuple(labels), hf=hf)


def vision_config_from_hf(raw: Mapping[str, Any], own: Collection[str] = ()) -> VisionConfig:
    """The config of a parsed config.json. Raises ConfigError for what is missing, unknown or not supported.

    own: keys that the user has written here and now: one of them that nobody reads is a slip, and refused.
    """
    if not is_vision(raw):
        raise ConfigError(
            f"config.json: model_type {raw.get('model_type')!r:.60} is no vision transformer; expected one of "
            f"{', '.join(CLASSES)}{what_it_is(raw.get('model_type'))}"
        )
    read = HfConfigReader({key: value for key, value in raw.items() if key not in UNUSED}, VALUES)
    is_dino = read.model_type == "dinov2"
    hidden, size = read.integer("hidden_size", 768), read.integer("image_size", 224)
    head = read_head(read, CLASSES[read.model_type], {})
    dropout = read.rate("hidden_dropout_prob", 0.0)
    config = VisionConfig(
        model_type=read.model_type,
        hidden_size=hidden,
        num_layers=read.integer("num_hidden_layers", 12),
        heads=read.integer("num_attention_heads", 12),
        ffn_hidden=hidden * read.integer("mlp_ratio", 4) if is_dino else read.integer("intermediate_size", 3072),
        image_size=size,
        trained_size=size,
        patch_size=read.integer("patch_size", 14 if is_dino else 16),
        channels=read.integer("num_channels", 3),
        norm_eps=read.number("layer_norm_eps", 1e-6 if is_dino else 1e-12),
        activation=read_activation(read, "hidden_act", "gelu"),
        init_std=read.number("initializer_range", 0.02),
        qkv_bias=read.flag("qkv_bias", True),
        layer_scale=read.number("layerscale_value", 1.0) if is_dino else None,
        dropouts=Dropouts(dropout, read.rate("attention_probs_dropout_prob", 0.0), dropout),
        head=head,
        labels=read_labels(read, head),
        hf=dict(raw),
    )
    read.finish(1)
    if is_dino and any(dataclasses.astuple(config.dropouts)):
        raise ConfigError("config.json: dropout is not supported for model_type 'dinov2'")
    refuse_slips(read.model_type, read.unread, own)
    return replace(config, unread=read.unread, notices=tuple(read.notices()))
