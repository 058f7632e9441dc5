"""Images as arrays: preprocessing as preprocessor_config.json says, unfolding to patches, and sets of labelled images.

A set is a folder with a folder of images for each class, an .npz with `images` and `labels`, or an IDX file of images
(`...images-idx3-ubyte`, plain or .gz) with its labels beside it. Pillow reads image files (the extra `vision`).
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpitp.data.line_file import class_of
from mpitp.data.npz import read_npz
from mpitp.errors import ConfigError, FileError, LaunchError
from mpitp.files import os_failure, read_json, read_regular

PREPROCESSOR = "preprocessor_config.json"
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
MOST_BYTES = 1 << 34
MOST_FILE_BYTES = 1 << 28
_BILINEAR = 2  # Pillow's number


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """Resize (both sides, or the shorter one), cut out the middle, scale to [0, 1], normalise.

    `resize`: (height, width), or one number for the shorter side; None: not. `crop`: height and width; None: not.
    """

    resize: tuple[int, ...] | None
    crop: tuple[int, int] | None
    resample: int
    factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def plain(cls, size: int, channels: int) -> Preprocessing:
        """What ViT does where no file says otherwise: to size x size, mean and deviation 0.5."""
        return cls((size, size), None, _BILINEAR, 1 / 255, (0.5,) * channels, (0.5,) * channels)

    @property
    def size(self) -> tuple[int, int] | None:
        """Height and width of what comes out; None: as the image is."""
        return self.crop or (self.resize if self.resize is not None and len(self.resize) == 2 else None)

    def normalised(self, pixels: np.ndarray) -> np.ndarray:
        """Numbers 0 to 255 [..., c, h, w] as the model takes them, float32."""
        mean, std = (np.array(values, np.float32)[:, None, None] for values in (self.mean, self.std))
        return (pixels.astype(np.float32) * np.float32(self.factor) - mean) / std

    def as_dict(self) -> dict[str, Any]:
        """As preprocessor_config.json has it."""
        size = self.resize or (0, 0)
        sides = {"height": size[0], "width": size[1]} if len(size) == 2 else {"shortest_edge": size[0]}
        crop = {"height": self.crop[0], "width": self.crop[1]} if self.crop else None
        return {
            "image_processor_type": "ViTImageProcessor",
            "do_resize": self.resize is not None,
            "size": sides,
            "resample": self.resample,
            "do_center_crop": self.crop is not None,
            "crop_size": crop,
            "do_rescale": True,
            "rescale_factor": self.factor,
            "do_normalize": True,
            "image_mean": list(self.mean),
            "image_std": list(self.std),
        }


def preprocessing_of(directory: str | Path, size: int, channels: int) -> Preprocessing:
    """What a model's directory says; the plain one where it says nothing."""
    path = Path(directory) / PREPROCESSOR
    if not path.exists():
        return Preprocessing.plain(size, channels)
    raw = read_json(path)
    try:
        resize = _sides(raw.get("size", size)) if raw.get("do_resize", True) else None
        crop = _sides(raw.get("crop_size", size)) if raw.get("do_center_crop", False) else None
        normalises = raw.get("do_normalize", True)
        mean = raw.get("image_mean", [0.5] * channels) if normalises else [0.0] * channels
        std = raw.get("image_std", [0.5] * channels) if normalises else [1.0] * channels
        factor = float(raw.get("rescale_factor", 1 / 255)) if raw.get("do_rescale", True) else 1.0
        mean, std = tuple(float(x) for x in mean), tuple(float(x) for x in std)
        resample = int(raw.get("resample", _BILINEAR))
    except (TypeError, ValueError, KeyError) as error:
        raise FileError(f"{path} isn't understood: {error}") from error
    if len(mean) != channels or len(std) != channels or min(std) <= 0:
        raise FileError(f"{path}: image_mean and image_std must have {channels} numbers, the latter above 0")
    if crop is not None and len(crop) == 1:
        crop = crop * 2
    return Preprocessing(resize, None if crop is None else (crop[0], crop[1]), resample, factor, mean, std)


def _sides(value: Any) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value, value)
    if "shortest_edge" in value:
        return (int(value["shortest_edge"]),)
    return (int(value["height"]), int(value["width"]))


def load_image(path: str | Path, how: Preprocessing, channels: int) -> np.ndarray:
    """One image file, preprocessed: [c, h, w] float32. Raises FileError where it can't be read as an image."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise LaunchError('images are read by Pillow: pip install "mpitp[vision]"') from error
    if channels not in (1, 3):
        raise ConfigError(f"image files have 1 or 3 channels, the model takes {channels}")
    try:
        content = read_regular(path, MOST_FILE_BYTES)
    except OSError as error:
        raise os_failure("read", path, error) from error
    try:
        with Image.open(io.BytesIO(content)) as opened:
            image = opened.convert("L" if channels == 1 else "RGB")
    except Exception as error:  # Pillow raises many kinds for damaged files
        unknown = isinstance(error, UnidentifiedImageError)  # whose own words name an object in memory
        why = "it has no form that Pillow knows" if unknown else str(error)
        raise FileError(f"{path} can't be read as an image: {why}") from error
    pixels = np.asarray(_resized(image, how))
    return how.normalised(pixels[None] if channels == 1 else pixels.transpose(2, 0, 1))


def _resized(image: Any, how: Preprocessing) -> Any:
    """A Pillow image resized and cut as told."""
    if how.resize is not None:
        width, height = image.size
        if len(how.resize) == 1:
            scale = how.resize[0] / min(width, height)
            sides = (int(height * scale), int(width * scale))
            sides = (max(sides[0], how.resize[0]), max(sides[1], how.resize[0]))
        else:
            sides = (how.resize[0], how.resize[1])
        image = image.resize((sides[1], sides[0]), how.resample)
    if how.crop is not None:
        width, height = image.size
        top, left = (height - how.crop[0]) // 2, (width - how.crop[1]) // 2
        image = image.crop((left, top, left + how.crop[1], top + how.crop[0]))
    return image


def unfold(images: np.ndarray, patch: int) -> np.ndarray:
    """Images [b, c, h, w] as patches [b n, c p p], row by row; what doesn't fill a patch at the edges is left out."""
    b, c, height, width = images.shape
    rows, columns = height // patch, width // patch
    cut = images[:, :, : rows * patch, : columns * patch].reshape(b, c, rows, patch, columns, patch)
    return np.ascontiguousarray(cut.transpose(0, 2, 4, 1, 3, 5)).reshape(b * rows * columns, c * patch * patch)


@dataclass(frozen=True, slots=True)
class ImageSet:
    """Labelled images. `pixels` [n, c, h, w], 0 to 255, or None where they are files, read when they are due."""

    path: str
    labels: tuple[str, ...]
    pixels: np.ndarray | None
    files: tuple[Path, ...]
    sha256: str

    def classes(self) -> tuple[str, ...]:
        """The labels that occur; numbers in their own order."""
        found = set(self.labels)
        return tuple(sorted(found, key=int) if all(map(str.isdecimal, found)) else sorted(found))

    def targets(self, classes: Sequence[str]) -> list[int]:
        """The class of each image. Raises FileError for a label that is none of them."""
        numbers = {name: i for i, name in enumerate(classes)}
        return [class_of(label, numbers, self.path) for label in self.labels]

    def load(self, places: Sequence[int], how: Preprocessing, channels: int) -> np.ndarray:
        """The images at these places, preprocessed: [b, c, h, w] float32."""
        if self.pixels is None:
            return np.stack([load_image(self.files[i], how, channels) for i in places])
        return how.normalised(self.pixels[np.asarray(places)])


def open_images(path: str | Path, channels: int) -> ImageSet:
    """A folder of folders, an .npz or an IDX file. Raises FileError for what is none of them, or damaged."""
    where = Path(path)
    if where.is_dir():
        return _folder(where)
    try:
        content = read_regular(where, MOST_BYTES)
    except OSError as error:
        raise os_failure("read", where, error) from error
    pixels, labels = _of_npz(where, content) if where.suffix == ".npz" else _of_idx(where, content)
    pixels = pixels[:, None] if pixels.ndim == 3 else pixels.transpose(0, 3, 1, 2)
    if pixels.shape[1] != channels:
        raise FileError(f"{where} has images of {pixels.shape[1]} channels, the model takes {channels}")
    words = tuple(str(label) for label in labels.tolist())
    return ImageSet(str(where), words, pixels, (), hashlib.sha256(content).hexdigest())


def _folder(where: Path) -> ImageSet:
    files = sorted(
        file for folder in where.iterdir() if folder.is_dir() for file in folder.iterdir()
        if file.suffix.lower() in SUFFIXES
    )  # fmt: skip
    if not files:
        raise FileError(f"{where} holds no images; expected a folder of them for each class")
    names = [f"{file.relative_to(where)} {file.stat().st_size}" for file in files]
    digest = hashlib.sha256(json.dumps(names).encode()).hexdigest()
    return ImageSet(str(where), tuple(file.parent.name for file in files), None, tuple(files), digest)


def _of_npz(where: Path, content: bytes) -> tuple[np.ndarray, np.ndarray]:
    try:
        arrays = read_npz(io.BytesIO(content), ("images", "labels"))
    except (ValueError, OSError) as error:
        raise FileError(f"{where}: expected an .npz file with the arrays images and labels; {error}") from error
    pixels, labels = arrays["images"], arrays["labels"]
    _check_arrays(where, pixels, labels)
    return pixels, labels


def _of_idx(where: Path, content: bytes) -> tuple[np.ndarray, np.ndarray]:
    if "images-idx3" not in where.name:
        raise FileError(f"{where} is no folder of images, no .npz and no IDX file (...images-idx3-ubyte)")
    beside = where.with_name(where.name.replace("images-idx3", "labels-idx1"))
    try:
        labels = _idx(beside, read_regular(beside, MOST_BYTES))
    except OSError as error:
        raise os_failure("read", beside, error) from error
    pixels = _idx(where, content)
    _check_arrays(where, pixels, labels)
    return pixels, labels


def _idx(where: Path, content: bytes) -> np.ndarray:
    """The array of unsigned bytes in an IDX file."""
    try:
        content = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
        kind, dims = content[2], content[3]
        shape = struct.unpack(f">{dims}I", content[4 : 4 + 4 * dims])
        values = np.frombuffer(content, np.uint8, offset=4 + 4 * dims)
    except (OSError, EOFError, zlib.error, IndexError, struct.error, ValueError) as error:
        raise FileError(f"{where} is no IDX file: {error}") from error
    if content[:2] != b"\0\0" or kind != 8 or values.size != int(np.prod(shape, dtype=np.int64)):
        raise FileError(f"{where} is no whole IDX file of bytes")
    return values.reshape(shape)


def _check_arrays(where: Path, pixels: np.ndarray, labels: np.ndarray) -> None:
    if pixels.ndim not in (3, 4) or pixels.dtype != np.uint8 or labels.shape != pixels.shape[:1] or not len(pixels):
        raise FileError(
            f"{where}: expected images [n, h, w] or [n, h, w, c] of bytes and n labels, got {pixels.dtype} "
            f"{list(pixels.shape)} and {list(labels.shape)}"
        )
    if labels.dtype.kind not in "iuU":
        raise FileError(f"{where}: labels must be whole numbers or words, got {labels.dtype}")
