"""`mpitp eval`: how well a model predicts a text, on any number of ranks."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from typing import TYPE_CHECKING, Any

from mpitp.config import ACTIVATIONS, ACTIVATIONS_HELP, DTYPES
from mpitp.errors import ConfigError, UsageError
from mpitp.evaluate.held_out import KINDS, add_kinds
from mpitp.evaluate.held_out import run as run_held_out
from mpitp.files import os_failure, read_regular
from mpitp.paths import input_path, path_option
from mpitp.text import decode_text

if TYPE_CHECKING:
    from mpitp.evaluate.perplexity import Perplexity

MOST_WINDOW = 1024
MOST_BYTES = 1 << 30  # of a text

_DESCRIPTION = """\
Measure a model. `perplexity`: how many tokens it hesitates between while it reads a text.

  mpitp eval perplexity --model models/smollm2 held-out.txt

`pairs`, `labels`, `words`, `masked`, `images`: what models that don't continue text have learnt to do, on data that
they haven't seen: the part of right answers, and the mean loss.

  mpitp eval pairs --model runs/translation/model held-out.tsv         # of each target's tokens, and whole targets
  mpitp eval labels --model runs/sentiment/model held-out.tsv
  mpitp eval words --model runs/names/model held-out.conll             # with the F1 of spans
  mpitp eval masked --model models/rxnfp data/valid
  mpitp eval images --model runs/digits/model test/"""

_PERPLEXITY = """\
How many tokens a model hesitates between while it reads a text (the exponential of its mean loss), and the bits that a
byte of the text would take."""

_WINDOWS = """\
examples: rounded weights beside the floats they came from
  mpitp eval perplexity --model models/smollm2 held-out.txt
  mpitp eval perplexity --model models/smollm2-int8 held-out.txt
  mpitp launch -n 3 -- eval perplexity --model models/smollm2 held-out.txt --json

A text longer than --seq-len is read in windows --stride apart; each scores what the ones before it haven't. With a
stride below the length, what is scored has at least length - stride tokens of context, and it takes longer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `mpitp eval`."""
    parser.description = _DESCRIPTION
    kinds = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    ppl = kinds.add_parser("perplexity", help="of a model on a text", description=_PERPLEXITY, epilog=_WINDOWS)
    ppl.formatter_class = parser.formatter_class
    ppl.add_argument("text", type=input_path, metavar="TEXT", help="a UTF-8 text")
    ppl.add_argument("--model", required=True, type=path_option, metavar="DIR", help="Hugging Face directory")
    ppl.add_argument("--seq-len", type=int, metavar="N", help="tokens a window; default the model's, at most 1024")
    ppl.add_argument("--stride", type=int, metavar="N", help="from window to window; default --seq-len")
    ppl.add_argument("--batch", type=int, default=4, metavar="B", help="windows at a time; default 4")
    ppl.add_argument("--dtype", choices=DTYPES, default="float32", help="of weights and activations")
    ppl.add_argument("--activations", choices=ACTIVATIONS, default="auto", help=ACTIVATIONS_HELP)
    ppl.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="where arrays live")
    ppl.add_argument("--json", action="store_true", help="one JSON object")
    add_kinds(kinds, parser.formatter_class)


def run(args: argparse.Namespace) -> int:
    """Measure; every rank runs this, rank 0 prints."""
    if args.what in KINDS:
        return run_held_out(args)
    from mpitp.checkpoint.load import load_config, load_model, model_facts
    from mpitp.checkpoint.together import on_first_rank
    from mpitp.comm.agreement import agree, call_facts
    from mpitp.comm.start import start_job
    from mpitp.data.tokenizer import check_rows, load_tokenizer
    from mpitp.evaluate.perplexity import Windows, perplexity
    from mpitp.layers.site import make_site
    from mpitp.models.activations import round_activations
    from mpitp.progress_bar import progress_bar

    if args.batch < 1:
        raise UsageError(f"--batch {args.batch}: expected at least 1")
    group, device = start_job(args.device)
    agree(group, lambda: call_facts("eval", args, ["model", "text"]) | model_facts("--model", args.model))
    config = load_config(args.model)
    length, stride = _window(args, config.max_positions)
    content = on_first_rank(group, lambda: _read(args.text))
    tokenizer = load_tokenizer(args.model)
    ids = tokenizer.encode(decode_text(content, args.text))
    check_rows(tokenizer, [ids], config.vocab_size, args.model)
    model = load_model(args.model, make_site(group, dtype=args.dtype, device=device), config=config)
    round_activations(model, args.activations)
    started = time.perf_counter()
    with contextlib.ExitStack() as stack:
        update = None
        if group.rank == 0:
            update = stack.enter_context(progress_bar("reading", " tokens", len(ids) - 1, scale=True)).update
        found = perplexity(model, ids, len(content), Windows(length, stride, args.batch), update)
    if group.rank == 0:
        _say(args, found, (length, stride), time.perf_counter() - started)
    return 0


def _read(path: str) -> bytes:
    try:
        return read_regular(path, MOST_BYTES)
    except OSError as error:
        raise os_failure("read", path, error) from error


def _window(args: argparse.Namespace, max_positions: int) -> tuple[int, int]:
    """Length and stride of the windows. Raises ConfigError for those that the model doesn't have."""
    length = min(max_positions, MOST_WINDOW) if args.seq_len is None else args.seq_len
    if not 1 <= length <= max_positions:
        raise ConfigError(f"--seq-len {length}: the model has {max_positions} positions; expected 1 to {max_positions}")
    stride = length if args.stride is None else args.stride
    if not 1 <= stride <= length:
        raise UsageError(f"--stride {stride}: windows of {length} tokens begin at least 1 and at most {length} apart")
    return length, stride


def _say(args: argparse.Namespace, found: Perplexity, windows: tuple[int, int], seconds: float) -> None:
    record: dict[str, Any] = {
        "perplexity": found.perplexity,
        "loss": found.loss,
        "bits_per_byte": found.bits_a_byte,
        "tokens": found.num_tokens,
        "bytes": found.num_bytes,
        "seq_len": windows[0],
        "stride": windows[1],
        "tokens_per_second": found.num_tokens / seconds,
    }
    if args.json:
        print(json.dumps(record))
        return
    print(
        f"perplexity {found.perplexity:.4f} over {found.num_tokens} tokens ({found.loss:.4f} nats a token, "
        f"{found.bits_a_byte:.4f} bits a byte; windows of {windows[0]} tokens, {windows[1]} apart)"
    )
