"""A vision transformer (Dosovitskiy et al. 2021; DINOv2: Oquab et al. 2023): an image's patches are its tokens.

    patches       y = x W^T + b                     the convolution, as the product of unfolded pixels        [b n, h]
    tokens        z = [class + P_0, y_i + P_i]      positions interpolated to the image's grid          [b (n + 1), h]
    blocks.0, ... z = block_i(z)                    pre-norm; DINOv2 scales each branch (layer scale)
    final_norm    z = norm(z)
    head          logits of the class token (ViT), or of it beside the mean of the patches (DINOv2)          [b, c/tp]

A batch's `tokens` are pixels [b n, c p p], `rows` one run of n + 1 an image, `targets` a class an image.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from mpitp.backend.arrays import Array, from_host
from mpitp.errors import ConfigError
from mpitp.layers.block import TransformerBlock
from mpitp.layers.build import Builder
from mpitp.layers.dropout import Dropout
from mpitp.layers.init import init_params
from mpitp.layers.layer import Layer
from mpitp.layers.layer_scale import LayerScale
from mpitp.layers.mappings import ReduceFromTP
from mpitp.layers.patches import ClassAndMean, ImageTokens, PatchEmbedding
from mpitp.layers.placement import Cut, Part
from mpitp.layers.sandwich_block import SandwichBlock
from mpitp.layers.site import Site
from mpitp.models.batch import Batch
from mpitp.models.blocks import dropouts_of, encoder_branches
from mpitp.models.encoder_config import CLASSIFICATION, FEATURES
from mpitp.models.layered import HfNames, LayeredModel
from mpitp.models.names import HfPiece, dense_pieces, norm_pieces
from mpitp.models.stages import Chosen, Chunk, Cutting, chosen_chunks, token_costs
from mpitp.models.vision_config import VisionConfig

HEAD = "head"
IGNORABLE_TENSORS = ("*embeddings.mask_token", "*pooler.dense.*")


class Vision(LayeredModel):
    """A vision transformer on a site. Make one with `new_vision`, or `mpitp.checkpoint.vision.load_vision`."""

    config: VisionConfig
    entrance = "patches"

    def __init__(
        self, config: VisionConfig, site: Site, layers: dict[str, Layer], names: HfNames, chunks: Sequence[Chunk]
    ) -> None:
        labels = max(len(config.labels), 2)
        loss = Builder(site, 0.0).loss(site.share_of_few(labels), min(site.num_blocks, labels))
        super().__init__(site, layers, loss, names, chunks)
        self.config = config

    def inputs(self, batch: Batch) -> Array:
        config, (rows, columns) = self.config, self.config.grid
        width = config.channels * config.patch_size**2
        lengths = {run.length for run in (batch.rows.uncut() if batch.rows.everyone else batch.rows).runs}
        patches = np.count_nonzero(batch.rows.positions())
        if batch.tokens.shape != (patches, width) or lengths != {1 + rows * columns}:
            raise ConfigError(
                f"pixels of shape {batch.tokens.shape} for images of {sorted(lengths)} tokens; the model takes "
                f"{rows} x {columns} patches of {width} numbers each, and one token more"
            )
        return from_host(np.ascontiguousarray(batch.tokens, self.dtype), self.device.xp)

    def check_targets(self, targets: np.ndarray) -> None:
        if self.config.head == FEATURES:
            raise ConfigError("this model has no head whose loss could be computed: it gives features alone")
        if len(bad := targets[(targets < 0) | (targets >= len(self.config.labels))]):
            raise ConfigError(f"class {bad[0]} lies outside the model's {len(self.config.labels)}")


def build_vision(config: VisionConfig, site: Site, cutting: Cutting = Cutting()) -> Vision:  # noqa: B008  (frozen)
    """The model on a site, all parameters zero; of a mesh with stages, this rank's layers."""
    check_site(config, site)
    return _on(config, site, _chunks(config, site, cutting))


def abstract_vision(config: VisionConfig, site: Site, cutting: Cutting = Cutting()) -> Vision:  # noqa: B008
    """The model without memory: to count its parameters, or look at its types."""
    return _on(config, site.abstract(), _chunks(config, site, cutting))


def new_vision(config: VisionConfig, site: Site, *, seed: int) -> Vision:
    """A model with fresh weights, the same ones at every rank count."""
    model = build_vision(config, site)
    init_params(model.named_params(), seed)
    return model


def check_site(config: VisionConfig, site: Site) -> None:
    """Raise ConfigError for a site on which the model can't be right."""
    site.check_blocks({"num_attention_heads": config.heads, "intermediate_size": config.ffn_hidden})


def _chunks(config: VisionConfig, site: Site, cutting: Cutting) -> Chosen:
    """This rank's layers, chunk by chunk. Checks the whole model's types."""
    whole = _on(config, site.abstract())
    return chosen_chunks(whole.types(), layer_costs(config, whole.layers), site, cutting)


def layer_costs(config: VisionConfig, layers: Mapping[str, Layer]) -> dict[str, float]:
    """Multiplications a token that each layer takes forward; a head sees a row of each image, next to none."""
    return token_costs(layers, {"tokens": float(config.hidden_size), HEAD: 0.0}, {})


def _on(config: VisionConfig, site: Site, chosen: Chosen = Chosen()) -> Vision:  # noqa: B008  (frozen)
    makers = _makers(config, Builder(site, config.init_std))
    chunks = chosen.made_of(makers, site.batch_type, "" if config.head == FEATURES else HEAD)
    layers = {name: makers[name]() for chunk in chunks for name in chunk.names}
    return Vision(config, site, layers, HfNames(hf_pieces(config), IGNORABLE_TENSORS), chunks)


def _makers(config: VisionConfig, build: Builder) -> dict[str, Callable[[], Layer]]:
    """What makes each layer, by name, in forward order."""
    hidden, classes = config.hidden_size, len(config.labels)
    makers: dict[str, Callable[[], Layer]] = {
        "patches": lambda: _patches(config, build),
        "tokens": lambda: _tokens(config, build),
    }
    if config.dropouts.embedding:
        makers["embedding dropout"] = lambda: Dropout(config.dropouts.embedding, "embedding")
    makers |= {f"blocks.{i}": partial(_block, config, build, i) for i in range(config.num_layers)}
    makers["final_norm"] = lambda: build.layer_norm(hidden, config.norm_eps)
    if config.head == CLASSIFICATION and config.model_type == "dinov2":
        makers |= {"pooling": lambda: _pooling(config, build), HEAD: lambda: _classifier(build, 2 * hidden, classes)}
    elif config.head == CLASSIFICATION:
        makers[HEAD] = lambda: build.on_first_rows(
            hidden, lambda build: {"classifier": build.classifier(hidden, classes)}
        )
    return makers


def _patches(config: VisionConfig, build: Builder) -> PatchEmbedding:
    site, share, side = build.site, build.site.share(config.hidden_size), config.patch_size
    cut, inner = Cut.of(share), tuple(Cut.whole(size) for size in (config.channels, side, side))
    weight = site.param(site.placement([Part("patch", (cut, *inner))]), std=config.init_std, decay=True)
    bias = site.param(site.placement([Part("patch", (cut,))]))
    return PatchEmbedding(weight, bias, build.gather(share))


def _pooling(config: VisionConfig, build: Builder) -> ClassAndMean:
    rows, columns = config.grid
    reduce = ReduceFromTP(build.site.summation()) if build.site.sequence_parallel else None
    images = build.site.mesh["cp"]
    return ClassAndMean(config.hidden_size, rows * columns, reduce, images if images.size > 1 else None)


def _classifier(build: Builder, width: int, classes: int) -> Layer:
    """Of rows that lie whole on every rank."""
    return build.on_whole_rows().classifier(width, classes)


def _tokens(config: VisionConfig, build: Builder) -> ImageTokens:
    rows, columns = config.table_grid
    token = build.between(1, 1, config.hidden_size, std=config.init_std)
    positions = build.between(1, 1 + rows * columns, config.hidden_size, std=config.init_std)
    return ImageTokens(token, positions, config.table_grid, config.grid)


def _block(config: VisionConfig, build: Builder, index: int) -> Layer:
    hidden = config.hidden_size
    attention, mlp = encoder_branches(config, build, f"blocks.{index}", qkv_bias=config.qkv_bias)
    norm1, norm2 = (build.layer_norm(hidden, config.norm_eps) for _ in range(2))
    if config.layer_scale is None:
        return TransformerBlock(norm1, attention, norm2, mlp, dropouts_of(config, index))
    scale1, scale2 = (LayerScale(build.between(hidden, value=config.layer_scale)) for _ in range(2))
    return SandwichBlock((norm1, scale1, norm2, scale2), attention, mlp)


_VIT_BLOCK = {
    ("norm1", ""): "layernorm_before",
    ("attention.qkv", "q"): "attention.attention.query",
    ("attention.qkv", "k"): "attention.attention.key",
    ("attention.qkv", "v"): "attention.attention.value",
    ("attention.out", "out"): "attention.output.dense",
    ("norm2", ""): "layernorm_after",
    ("mlp.up", "up"): "intermediate.dense",
    ("mlp.down", "down"): "output.dense",
}
_DINO_BLOCK = {
    **_VIT_BLOCK,
    ("norm1", ""): "norm1",
    ("norm2", ""): "norm2",
    ("mlp.up", "up"): "mlp.fc1",
    ("mlp.down", "down"): "mlp.fc2",
}


def hf_pieces(config: VisionConfig) -> dict[tuple[str, str], HfPiece]:
    """Where each part of each parameter lies in a directory."""
    is_dino = config.model_type == "dinov2"
    base = "" if config.head == FEATURES else f"{config.model_type}."
    pieces = {
        ("tokens.token", ""): HfPiece(f"{base}embeddings.cls_token"),
        ("tokens.positions", ""): HfPiece(f"{base}embeddings.position_embeddings"),
        **dense_pieces("patches", "patch", f"{base}embeddings.patch_embeddings.projection"),
        **norm_pieces("final_norm", f"{base}layernorm"),
    }
    for i in range(config.num_layers):
        ours, theirs = f"blocks.{i}", f"{base}encoder.layer.{i}"
        for (name, part), hf_name in (_DINO_BLOCK if is_dino else _VIT_BLOCK).items():
            has_bias = config.qkv_bias or name != "attention.qkv"
            names = f"{ours}.{name}", f"{theirs}.{hf_name}"
            pieces |= dense_pieces(names[0], part, names[1], has_bias=has_bias) if part else norm_pieces(*names)
        for number in (1, 2) if is_dino else ():
            pieces[f"{ours}.post_norm{number}.weight", ""] = HfPiece(f"{theirs}.layer_scale{number}.lambda1")
    if config.head == CLASSIFICATION:
        pieces |= dense_pieces("head" if is_dino else "head.classifier", "labels", "classifier")
    return pieces
