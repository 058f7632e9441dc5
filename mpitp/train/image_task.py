"""The task of a vision transformer: a class for each image of a folder, an .npz or an IDX file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import numpy as np

from mpitp.checkpoint.vision import load_vision_config
from mpitp.comm.group import Group
from mpitp.config import RunConfig
from mpitp.data.images import PREPROCESSOR, ImageSet, Preprocessing, open_images, preprocessing_of, unfold
from mpitp.data.sampler import windows_of
from mpitp.errors import ConfigError
from mpitp.layers.passes import DropoutState
from mpitp.layers.rows import Rows
from mpitp.models.batch import Batch
from mpitp.models.encoder_config import CLASSIFICATION
from mpitp.models.vision_config import VisionConfig, vision_config_from_hf
from mpitp.train.deal import Deal
from mpitp.train.encoder_task import EncoderTask
from mpitp.train.named_model import classes_of, named_config


class ImageTask(EncoderTask):
    """Images with a class each."""

    model_config: VisionConfig

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        base = base_config(config)
        self.images = open_images(config.data.train, base.channels)
        self.valid = None if config.data.valid is None else open_images(config.data.valid, base.channels)
        self.how = preprocessing(config, base)
        classes = classes_of(base, CLASSIFICATION, self.images)
        self.model_config = base.with_head(CLASSIFICATION, classes)
        self.targets = self.images.targets(classes)
        self.valid_targets = [] if self.valid is None else self.valid.targets(classes)
        self.has_valid, self.sha256 = self.valid is not None, self.images.sha256
        self.files = {PREPROCESSOR: json.dumps(self.how.as_dict(), indent=2).encode()}
        for images in (self.images, self.valid):
            if images is not None:
                _check_size(images, self.model_config)

    def notices(self) -> Sequence[str]:
        return list(self.model_config.notices)

    def check(self, world: Group) -> None:
        """The files have been read, or are read when they are due."""

    def batch(self, samples: Sequence[int], places: Sequence[int], dropout: DropoutState | None) -> Batch:
        chosen = windows_of(samples, len(self.targets), self.config.train.seed)
        targets = [self.targets[i] for i in chosen]
        return self._batch(self.images, chosen.tolist(), targets, dropout, places)

    def whole_held_out(self, deal: Deal) -> Iterator[Batch]:
        assert self.valid is not None, "asked for where there is one"
        count, micro = len(self.valid_targets), self.config.train.micro_batch_size
        for number in deal.of(-(-count // micro)):
            places = range(number * micro, min((number + 1) * micro, count))
            yield self._batch(self.valid, places, [self.valid_targets[i] for i in places])

    def _batch(
        self,
        images: ImageSet,
        chosen: Sequence[int],
        targets: Sequence[int],
        dropout: DropoutState | None = None,
        places: Sequence[int] = (),
    ) -> Batch:
        pixels = images.load(chosen, self.how, self.model_config.channels)
        rows, columns = self.model_config.grid
        runs = Rows.of([1 + rows * columns] * len(chosen), samples=places)
        return Batch(unfold(pixels, self.model_config.patch_size), runs, np.asarray(targets, np.int64), dropout)


def base_config(config: RunConfig) -> VisionConfig:
    """The vision transformer that the run file names, whatever head is on it."""
    return named_config(config.model, load_vision_config, vision_config_from_hf)


def preprocessing(config: RunConfig, model: VisionConfig) -> Preprocessing:
    """What the directory to start from does with images, or ViT's own way."""
    size, directory = model.image_size, config.model.from_
    how = Preprocessing.plain(size, model.channels)
    if directory is not None:
        how = preprocessing_of(directory, size, model.channels)
    if how.size not in (None, (size, size)):
        raise ConfigError(f"{directory}: {PREPROCESSOR} makes images of {how.size}, the model takes {size} x {size}")
    return how


def _check_size(images: ImageSet, model: VisionConfig) -> None:
    """Arrays aren't resized."""
    if images.pixels is not None and images.pixels.shape[2:] != (model.image_size,) * 2:
        height, width = images.pixels.shape[2:]
        raise ConfigError(
            f"{images.path} has images of {height} x {width}, the model takes {model.image_size} x {model.image_size}: "
            "set image_size, or prepare others"
        )
