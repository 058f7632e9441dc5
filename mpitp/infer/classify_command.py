"""`mpitp classify`: the likeliest classes of images by a vision transformer, on any number of ranks."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from mpitp.error_stream import tell
from mpitp.errors import ConfigError, UsageError
from mpitp.infer.lines import takes_every_letter, write_out
from mpitp.paths import path_option

if TYPE_CHECKING:
    import numpy as np

    from mpitp.data.images import Preprocessing
    from mpitp.models.vision import Vision

IMAGES_A_PASS = 8

_DESCRIPTION = """\
Say what images show, with a vision transformer (ViT, DINOv2) that has classes: a Hugging Face directory, as `mpitp
train` with [task] kind = "image" writes it, or from elsewhere. Images are resized and normalised as
preprocessor_config.json says; Pillow reads them (pip install "mpitp[vision]")."""

_EPILOG = """\
examples:
  mpitp classify --model runs/digits/model seven.png three.png
  mpitp launch -n 2 -- classify --model DIR --top 3 --json *.jpg

Each image is a line: its name and the likeliest classes with their probabilities. --json prints one object an image:
image, classes (a list of class and probability). An image that can't be read ends the call before a line is printed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `mpitp classify`."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("--model", required=True, type=path_option, metavar="DIR", help="Hugging Face directory")
    parser.add_argument("images", nargs="+", type=path_option, metavar="IMAGE", help="image files")
    parser.add_argument("--top", type=int, default=5, metavar="K", help="how many classes are told; default 5")
    parser.add_argument("--json", action="store_true", help="one JSON object an image")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32", help="to compute in")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="where arrays live")


def run(args: argparse.Namespace) -> int:
    """Classify; every rank runs this, rank 0 prints."""
    if args.top < 1:
        raise UsageError(f"--top must be at least 1, got {args.top}")
    from mpitp.checkpoint.load import model_facts
    from mpitp.checkpoint.together import together
    from mpitp.checkpoint.vision import load_vision, load_vision_config
    from mpitp.comm.agreement import agree, call_facts
    from mpitp.comm.start import start_job
    from mpitp.data.images import load_image, preprocessing_of
    from mpitp.layers.site import make_site

    group, device = start_job(args.device)
    agree(group, lambda: call_facts("classify", args, ["model"]) | model_facts("--model", args.model))
    config = load_vision_config(args.model)
    if not config.labels:
        raise ConfigError(
            f'{args.model} has no classes, only features; mpitp train with [task] kind = "image" gives it some'
        )
    how = preprocessing_of(args.model, config.image_size, config.channels)
    config = config.for_size(_side(how, config.image_size))
    images = together(group, lambda: [load_image(path, how, config.channels) for path in args.images])
    model = load_vision(args.model, make_site(group, dtype=args.dtype, device=device), config=config)
    found = probabilities(model, images)
    if group.rank == 0:
        tell(config.notices)
        for path, row in zip(args.images, found, strict=True):
            write_out(_line(path, row, config.labels, args) + "\n")
    return 0


def _side(how: Preprocessing, usual: int) -> int:
    """The side of the square images that preprocessing makes."""
    height, width = how.size or (usual, usual)
    if height != width:
        raise ConfigError(f"images of {height} x {width}: only square ones are supported")
    return height


def probabilities(model: Vision, images: list[np.ndarray]) -> np.ndarray:
    """softmax(logits) of each image [n, classes], the same on every rank. A collective over the model's ranks."""
    import numpy as np

    from mpitp.backend.arrays import to_host
    from mpitp.data.images import unfold
    from mpitp.layers.rows import Rows
    from mpitp.models.batch import Batch

    rows, columns = model.config.grid
    logits = []
    for first in range(0, len(images), IMAGES_A_PASS):
        some = np.stack(images[first : first + IMAGES_A_PASS])
        batch = Batch(unfold(some, model.config.patch_size), Rows.of([1 + rows * columns] * len(some)))
        logits.append(to_host(model.gather_logits(model.forward(batch)[0])))
    e = np.exp(np.concatenate(logits) - np.concatenate(logits).max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def _line(path: str, row: np.ndarray, labels: tuple[str, ...], args: argparse.Namespace) -> str:
    best = [(labels[i], float(row[i])) for i in row.argsort(kind="stable")[::-1][: args.top]]
    if args.json:
        classes = [{"class": name, "probability": p} for name, p in best]
        return json.dumps({"image": path, "classes": classes}, ensure_ascii=not takes_every_letter(sys.stdout))
    return f"{path}: " + ", ".join(f"{name} {p:.4f}" for name, p in best)
