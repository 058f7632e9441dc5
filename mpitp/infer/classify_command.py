"""`mpitp classify`: the likeliest classes of images, texts or words, on any number of ranks."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mpitp.error_stream import tell
from mpitp.errors import ConfigError, FileError, UsageError
from mpitp.infer.lines import given_texts, takes_every_letter, write_out
from mpitp.paths import input_path, path_option

if TYPE_CHECKING:
    import numpy as np

    from mpitp.backend.device import Device
    from mpitp.comm.group import Group
    from mpitp.data.images import Preprocessing
    from mpitp.infer.classify_texts import Words
    from mpitp.models.vision import Vision

IMAGES_A_PASS = 8

_DESCRIPTION = """\
Say what images show, with a vision transformer (ViT, DINOv2) that has classes, or to which class texts or their words
belong, with an encoder (BERT, RoBERTa, DistilBERT) that has a head for it: a Hugging Face directory, as `mpitp train`
with [task] kind = "image", "classification" or "token-classification" writes it, or from elsewhere. Images are resized
and normalised as preprocessor_config.json says; Pillow reads them (pip install "mpitp[vision]")."""

_EPILOG = """\
examples:
  mpitp classify --model runs/digits/model seven.png three.png
  mpitp launch -n 2 -- classify --model DIR --top 3 --json *.jpg
  mpitp classify --model runs/tone/model "what a day" "not again"
  mpitp classify --model runs/names/model --file sentences.txt      one text a line; "-": standard input

Each image or text is a line: its name or itself, and the likeliest classes with their probabilities. Classes of words
come as they are learnt: WORD TAB LABEL a line, an empty line behind each text, _ for a word that was cut off. --json
prints one object an image (image, classes), text (text, classes) or text with words (text, words: word, label,
probability). What can't be read, and an empty text, end the call before a line is printed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `mpitp classify`."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("--model", required=True, type=path_option, metavar="DIR", help="Hugging Face directory")
    parser.add_argument("inputs", nargs="*", metavar="IMAGE|TEXT", help="image files, or texts")
    parser.add_argument("--file", type=path_option, metavar="F", help='one text a line ("-": standard input)')
    parser.add_argument("--top", type=int, default=5, metavar="K", help="how many classes are told; default 5")
    parser.add_argument("--json", action="store_true", help="one JSON object an image or text")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32", help="to compute in")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="where arrays live")


def run(args: argparse.Namespace) -> int:
    """Classify; every rank runs this, rank 0 prints."""
    _check(args)
    from mpitp.checkpoint.hf_directory import read_config
    from mpitp.checkpoint.load import model_facts
    from mpitp.comm.agreement import agree, call_facts
    from mpitp.comm.start import start_job
    from mpitp.models.encoders import ENCODER_TYPES
    from mpitp.models.kinds import is_encoder, is_vision
    from mpitp.models.nearest import what_it_is
    from mpitp.models.vision_config import CLASSES

    group, device = start_job(args.device)
    agree(group, lambda: call_facts("classify", args, ["model"]) | model_facts("--model", args.model))
    raw = read_config(args.model)
    if not (is_encoder(raw) or is_vision(raw)):
        raise ConfigError(
            f"{args.model}: config.json: a model of type {raw.get('model_type')!r:.60} has no classes; expected an "
            f"encoder ({', '.join(ENCODER_TYPES)}) or a vision transformer ({', '.join(CLASSES)})"
            f"{what_it_is(raw.get('model_type'))}"
        )
    classified = _of_texts if is_encoder(raw) else _of_images
    lines = classified(args, group, device)
    if group.rank == 0:
        for line in lines:
            write_out(line + "\n")
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.top < 1:
        raise UsageError(f"--top must be at least 1, got {args.top}")
    if args.inputs == ["-"]:
        raise UsageError("the text is -; standard input is read by --file -")
    if args.inputs and args.file:
        raise UsageError("give texts as words or by --file, not by both")
    if not args.inputs and not args.file:
        raise UsageError("nothing to classify was given; give IMAGE ... or TEXT ..., or --file F with texts")


def _of_images(args: argparse.Namespace, group: Group, device: Device) -> Iterator[str]:
    """A line for each image."""
    from mpitp.checkpoint.together import together
    from mpitp.checkpoint.vision import load_vision, load_vision_config
    from mpitp.data.images import load_image, preprocessing_of
    from mpitp.layers.site import make_site

    if args.file:
        raise UsageError(f"--file gives texts, and {args.model} is a model of images; name the images")
    config = load_vision_config(args.model)
    if not config.labels:
        raise ConfigError(
            f'{args.model} has no classes, only features; mpitp train with [task] kind = "image" gives it some'
        )
    how = preprocessing_of(args.model, config.image_size, config.channels)
    config = config.for_size(_side(how, config.image_size))
    paths = _paths(args.inputs)
    together(group, lambda: _check_there(paths, args.model))
    images = together(group, lambda: [load_image(path, how, config.channels) for path in paths])
    model = load_vision(args.model, make_site(group, dtype=args.dtype, device=device), config=config)
    found = probabilities(model, images)
    if group.rank == 0:
        tell(config.notices)
    return (_line("image", path, row, config.labels, args) for path, row in zip(paths, found, strict=True))


def _paths(names: list[str]) -> list[str]:
    try:
        return [input_path(name) for name in names]
    except argparse.ArgumentTypeError as error:
        raise UsageError(str(error)) from None


def _check_there(paths: list[str], model: str) -> None:
    for path in paths:
        if not os.path.lexists(path):
            raise FileError(
                f"can't read {path}: no such file, and {model} is a model of images; texts go to an encoder with "
                "classes (bert, roberta, distilbert)"
            )


def _of_texts(args: argparse.Namespace, group: Group, device: Device) -> Iterator[str]:
    """A line for each text, or for each word of it."""
    from mpitp.checkpoint.encoder import load_encoder, load_encoder_config
    from mpitp.data.tokenizer import check_fits, check_rows, load_tokenizer
    from mpitp.infer.classify_texts import check_has_classes, classes_of_texts, classes_of_words
    from mpitp.infer.embed import most_tokens
    from mpitp.layers.site import make_site
    from mpitp.models.encoder_config import TOKENS

    texts = given_texts(args.inputs, args.file, group)
    config, tokenizer = load_encoder_config(args.model), load_tokenizer(args.model)
    check_has_classes(config, args.model)
    check_fits(tokenizer, config.vocab_size, args.model)
    most, encoded = most_tokens(args.model, config.max_positions), tokenizer.encode_all(texts)
    check_rows(tokenizer, encoded, config.vocab_size, args.model)
    model = load_encoder(args.model, make_site(group, dtype=args.dtype, device=device))
    cut = sum(len(ids) > most for ids in encoded)
    notes = [f"{cut} of {len(texts)} texts are longer than {most} tokens and were cut"] if cut else []
    if group.rank == 0:
        tell([*config.notices, *notes])
    if config.head == TOKENS:
        of_words = classes_of_words(model, tokenizer, texts, most)
        return (_words(text, words, args) for text, words in zip(texts, of_words, strict=True))
    found = classes_of_texts(model, [tokenizer.shortened(ids, most) for ids in encoded])
    return (_line("text", text, row, config.labels, args) for text, row in zip(texts, found, strict=True))


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


def _line(what: str, name: str, row: np.ndarray, labels: Sequence[str], args: argparse.Namespace) -> str:
    best = [(labels[i], float(row[i])) for i in row.argsort(kind="stable")[::-1][: args.top]]
    if args.json:
        return _json({what: name, "classes": [{"class": label, "probability": p} for label, p in best]})
    shown = name if what == "image" else " ".join(name.split())
    return f"{shown}: " + ", ".join(f"{label} {p:.4f}" for label, p in best)


def _words(text: str, found: Words, args: argparse.Namespace) -> str:
    pairs = list(zip(found.words, found.labels, strict=True))
    if args.json:
        told = [{"word": word, "label": best and best[0], "probability": best and best[1]} for word, best in pairs]
        return _json({"text": text, "words": told})
    return "".join(f"{word}\t{best[0] if best else '_'}\n" for word, best in pairs)


def _json(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=not takes_every_letter(sys.stdout))
