"""`mpitp embed`: vectors of texts by an encoder, on any number of ranks."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mpitp.error_stream import tell
from mpitp.errors import FileError, UsageError
from mpitp.files import replace_file
from mpitp.infer.lines import given_texts, takes_every_letter, write_out
from mpitp.paths import path_option

if TYPE_CHECKING:
    import numpy as np

    from mpitp.data.tokenizer import Tokenizer

_DESCRIPTION = """\
Turn texts into vectors with an encoder (BERT, RoBERTa, DistilBERT; all-MiniLM-L6-v2 among them) in a Hugging Face
directory. Texts of unequal length are packed without padding; each gets the vector that it gets alone."""

_EPILOG = """\
examples:
  mpitp embed --model models/minilm "A cat sat." "Dogs bark." --normalize --json
  mpitp launch -n 2 -- embed --model models/minilm --file sentences.txt --normalize --out vectors.npy
  cat sentences.txt | mpitp embed --model models/minilm --file - --json      one text a line

--json prints one object a text: text, embedding. --out writes a NumPy file [texts, width], of --dtype,
in the texts' order. Without either each text is a line of numbers. With --normalize the product of two vectors is the
cosine of their angle. A text longer than the model's positions (or than sentence_bert_config.json says) is cut, and
that is told; an empty one is refused."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `mpitp embed`."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument(
        "--model", required=True, type=path_option, metavar="DIR", help="Hugging Face directory with a tokenizer"
    )
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="a text")
    parser.add_argument("--file", type=path_option, metavar="F", help='one text a line ("-": standard input)')
    parser.add_argument("--pool", choices=("mean", "cls"), help="default: as 1_Pooling/config.json says, else mean")
    parser.add_argument("--normalize", action="store_true", help="vectors of length one")
    parser.add_argument("--json", action="store_true", help="one JSON object a text")
    parser.add_argument("--out", type=path_option, metavar="X.NPY", help="write a NumPy file")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="cut texts at N tokens")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32", help="to compute in")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="where arrays live")


def run(args: argparse.Namespace) -> int:
    """Embed; every rank runs this, rank 0 prints."""
    _check(args)
    from mpitp.checkpoint.encoder import load_encoder_config, load_trunk
    from mpitp.checkpoint.load import model_facts
    from mpitp.comm.agreement import agree, call_facts
    from mpitp.comm.start import start_job
    from mpitp.data.tokenizer import check_fits, check_rows, load_tokenizer
    from mpitp.infer.embed import default_pool, embed, most_tokens
    from mpitp.layers.site import make_site

    group, device = start_job(args.device)
    agree(group, lambda: call_facts("embed", args, ["model"]) | model_facts("--model", args.model))
    texts = given_texts(args.texts, args.file, group)
    config, tokenizer = load_encoder_config(args.model), load_tokenizer(args.model)
    check_fits(tokenizer, config.vocab_size, args.model)
    pool = args.pool or default_pool(args.model)
    most = min(args.max_tokens or config.max_positions, most_tokens(args.model, config.max_positions))
    encoded, notes = _encoded(tokenizer, texts, most)
    check_rows(tokenizer, encoded, config.vocab_size, args.model)
    model = load_trunk(args.model, make_site(group, dtype=args.dtype, device=device))
    vectors = embed(model, encoded, pool, normalize=args.normalize)
    refusal = None
    if group.rank == 0:
        tell([*config.notices, *notes])
        refusal = _give(args, texts, vectors)
    refusal = group.broadcast_object(refusal)
    if refusal is not None:
        raise refusal
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.texts == ["-"]:
        raise UsageError("the text is -; standard input is read by --file -")
    if args.texts and args.file:
        raise UsageError("give texts as words or by --file, not by both")
    if not args.texts and not args.file:
        raise UsageError("no text was given; give TEXT ..., or --file F (--file -: standard input)")
    if args.json and args.out:
        raise UsageError("--json prints the vectors and --out writes them; choose one")
    if args.max_tokens is not None and args.max_tokens < 3:
        raise UsageError(f"--max-tokens must be at least 3, got {args.max_tokens}")


def _encoded(tokenizer: Tokenizer, texts: list[str], most: int) -> tuple[list[list[int]], list[str]]:
    """Token ids of the texts with what the tokenizer puts around each, cut to `most`; and what is to be told."""
    encoded = tokenizer.encode_all(texts)
    cut = [len(ids) > most for ids in encoded]
    notes = [f"{sum(cut)} of {len(texts)} texts are longer than {most} tokens and were cut"] if any(cut) else []
    return [tokenizer.shortened(ids, most) for ids in encoded], notes


def _give(args: argparse.Namespace, texts: list[str], vectors: np.ndarray) -> FileError | None:
    """Print or write the vectors; the error that must be raised on every rank."""
    from mpitp.infer.embed import as_json

    try:
        if args.out:
            _write_npy(Path(args.out), vectors)
        elif args.json:
            ascii_only = not takes_every_letter(sys.stdout)
            for text, vector in zip(texts, vectors, strict=True):
                write_out(as_json(text, vector, ascii_only=ascii_only) + "\n")
        else:
            for vector in vectors:
                write_out(" ".join(f"{x:.8g}" for x in vector) + "\n")
    except FileError as error:
        return error
    return None


def _write_npy(path: Path, vectors: np.ndarray) -> None:
    """A NumPy file, published by rename."""
    import io

    import numpy as np

    buffer = io.BytesIO()
    np.save(buffer, vectors)
    replace_file(path, buffer.getvalue())
