"""`mpitp step`: a pass of all ranks, one operation at a time."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mpitp.comm.environment import launch_claim
from mpitp.errors import UsageError
from mpitp.paths import path_option

if TYPE_CHECKING:
    from mpitp.step.film import Film
    from mpitp.step.mesh_pass import Layout
    from mpitp.step.walk import Walk
    from mpitp.step.wish import Wish

_DESCRIPTION = """\
Step through one training step of a model whose ranks are simulated as threads of this process, one operation at a time,
forwards and backwards: the equation, why it is there and what would break without it, every rank's arrays side by side,
each with the letter of its type (I, R, V or P), each collective with its messages, its bytes and its conjugate in the
other pass, the gradient norm, clipping and AdamW, and the memory held.
All numbers come from the real layers. Without a model, a tiny Llama is used, in which every number can be seen;
--preset has other ones: of models that continue text, an encoder (bert), one of images (vit), encoder-decoders."""

_EPILOG = """\
examples:
  mpitp step                                       a tiny Llama on 3 ranks; keys are listed on the screen
  mpitp step -n 2 --preset gpt2 --predict          asks before it shows, and keeps a score
  mpitp step --set num_attention_heads=5 --set num_key_value_heads=1 -n 4
  mpitp step --model models/smollm2 --block 4 -n 2 --text "The capital of France is"
  mpitp step --html out.html                       the same as one page for a browser, without a network
  mpitp step --html out.html -n 3,1,2,4            with films of 1 to 4 ranks, plain and invariant
  mpitp step --preset t5 --break cross             to the cross attention of an encoder-decoder
  mpitp step --preset t5 --pp 2 --rows             its encoder on one stage, its decoder on the other
  mpitp step --pp 2 --dp 2                         4 ranks on two axes; m shows a row for each of them
  mpitp step --pp 2 --schedule zb --rows           weight gradients that fill the bubble
  mpitp step --dp 2 --zero 1 --rows                each replica updates its rows of the weights
  mpitp step --dp 2 --zero 3                       weights gathered for each layer and forgotten behind it
  mpitp step --dp 2 --invariant                    gradients added in the order of their microbatches
  mpitp step -n 4 --cp 2 --sequence-parallel       keys round a ring of two, beside tp = 2
  mpitp step --preset mixtral --ep 2               experts on two ranks: who sends which rows to whom
  mpitp step --list                                all operations, one a line
  mpitp step --show 7                              one operation
  printf 'xxjq' | mpitp step                       keys from a pipe"""


_PRESETS = ("llama", "gpt2", "qwen2", "mixtral", "bert", "vit", "t5", "bart")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `mpitp step`."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument(
        "-n", "--ranks", type=_rank_counts, metavar="N[,N...]",
        help="ranks to simulate; default 3, or as many as the axes below have. Several numbers, with --html: a film of "
        "each, plain and invariant",
    )  # fmt: skip
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--preset", choices=_PRESETS, default="llama", help="a tiny model")
    source.add_argument("--config", type=path_option, metavar="FILE", help="a config.json (no run file): fresh weights")
    source.add_argument(
        "--model", type=path_option, metavar="DIR", help="a Hugging Face directory; one block of it is taken"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a field of the config")
    parser.add_argument("--block", type=int, metavar="I", help="which block of --model; default 0")
    parser.add_argument(
        "--tokens", type=int, metavar="N", help="random tokens of a sequence; default 4, more where cut"
    )
    parser.add_argument("--text", help="a text to feed instead (with --model, by its tokenizer)")
    parser.add_argument(
        "--sequence-parallel", action="store_true", help="norms, dropout and residual connections on token shards"
    )
    _add_axes(parser)
    parser.add_argument(
        "--invariant", action="store_true", help="the mode that is equal to the last bit in all layouts (tp, pp and dp)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of fresh weights and random tokens")
    parser.add_argument("--at", type=int, default=1, metavar="K", help="begin at operation K")
    parser.add_argument(
        "--break", dest="breaks", action="append", default=[], metavar="NAME",
        help='a breakpoint: part of a layer\'s name, or "collectives"',
    )  # fmt: skip
    parser.add_argument("--predict", action="store_true", help="begin in predict mode")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--html", type=path_option, metavar="OUT.HTML", help="write one self-contained page instead")
    output.add_argument("--list", action="store_true", help="print all operations, one a line")
    output.add_argument("--rows", action="store_true", help="print a row for each rank, and the messages between them")
    output.add_argument("--show", type=int, metavar="K", help="print operation K with all its arrays")


def _add_axes(parser: argparse.ArgumentParser) -> None:
    axes = parser.add_argument_group("axes beside tp, which has the ranks that these leave")
    axes.add_argument("--pp", type=int, default=1, metavar="N", help="stages of a pipeline")
    axes.add_argument("--dp", type=int, default=1, metavar="N", help="replicas, each with sequences of its own")
    axes.add_argument("--ep", type=int, default=1, metavar="N", help="ranks to which experts are dealt")
    axes.add_argument("--cp", type=int, default=1, metavar="N", help="ranks over which every sequence is cut")
    axes.add_argument("--cp-form", choices=("ring", "heads"), default="ring", help="keys go round, or rows for heads")
    axes.add_argument("--schedule", choices=("1f1b", "gpipe", "interleaved", "zb"), default="1f1b",
        help="of the stages; interleaved: two parts of the model each; zb: weight gradients put off",
    )  # fmt: skip
    axes.add_argument(
        "--zero", type=int, choices=(0, 1, 2, 3), default=0,
        help="ZeRO: replicas keep rows of the moments (1), of the gradients too (2), of the weights too (3)",
    )  # fmt: skip
    axes.add_argument(
        "--microbatches", type=int, default=0, metavar="N", help="sequences of a replica; default: one a stage"
    )


def run(args: argparse.Namespace) -> int:
    """Step, print, or write the page."""
    if launch_claim(os.environ).size > 1:
        raise UsageError("step simulates its ranks as threads of one process: run it alone, with -n for the ranks")
    if args.model is not None and args.set:
        raise UsageError("--set changes a config with fresh weights; a model's own config stays as it is")
    if args.model is None and args.block is not None:
        raise UsageError("--block says which block of --model to take; a model with fresh weights is shown whole")
    if len(args.ranks or ()) > 1 and not args.html:
        raise UsageError(
            f"--ranks {','.join(map(str, args.ranks))}: several layouts go into a page; add --html OUT.HTML"
        )
    from mpitp.step.source import make_film
    from mpitp.step.terminal import run as run_terminal
    from mpitp.step.wish import Wish

    wish = Wish(
        ranks=args.ranks[0] if args.ranks else None, preset=args.preset, config=args.config,
        overrides=tuple(args.set), model=args.model, block=args.block or 0, tokens=args.tokens, text=args.text,
        seed=args.seed, layout=_layout(args), invariant=args.invariant,
    )  # fmt: skip
    if args.html:
        return _write_page(args, wish)
    film = make_film(wish)
    if args.list or args.rows or args.show is not None:
        from mpitp.step.rows import row_lines
        from mpitp.step.screen import list_lines, whole_op

        if args.rows:
            print("\n".join(row_lines(film, shutil.get_terminal_size((80, 24)).columns)))
            return 0
        print("\n".join(list_lines(film) if args.list else whole_op(film, film.op(args.show))))
        return 0
    walk = _walk(film, args)
    walk.message = "" if sys.stdin.isatty() else walk.message
    return run_terminal(walk)


def _layout(args: argparse.Namespace) -> Layout:
    """The axes. Raises UsageError for numbers that can't be."""
    from mpitp.step.mesh_pass import Layout

    for name in ("pp", "dp", "ep", "cp"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.microbatches and args.microbatches < args.pp:
        raise UsageError(f"--microbatches {args.microbatches}: {args.pp} stages take as many at least")
    return Layout(
        pp=args.pp, dp=args.dp, ep=args.ep, cp=args.cp, schedule=args.schedule, microbatches=args.microbatches,
        cp_form=args.cp_form, sequence_parallel=args.sequence_parallel, zero=args.zero,
    )  # fmt: skip


def _walk(film: Film, args: argparse.Namespace) -> Walk:
    """A reader at the place, with the breakpoints, that the options say."""
    from mpitp.step.walk import Walk

    walk = Walk(film, film.op(args.at).number, predicts=args.predict)
    for name in args.breaks:
        walk.answer(name)
        if name not in walk.breakpoints:
            raise UsageError(f"--break {name}: no layer's name contains that; mpitp step --list shows them")
    return walk


def _write_page(args: argparse.Namespace, wish: Wish) -> int:
    from mpitp.step.page import Start, check_page, write_page
    from mpitp.step.source import make_films

    check_page(Path(args.html))
    films, left_out = make_films(wish, args.ranks or (None,))
    walk = _walk(films[0], args)
    write_page(Path(args.html), films, Start(walk.number, tuple(walk.breakpoints), walk.predicts))
    for reason in left_out:
        print(f"left out: {reason}")
    print(f"{args.html}: open it in a browser; ? there lists the keys")
    return 0


def _rank_counts(text: str) -> tuple[int, ...]:
    """The numbers of "1,2,3", each once."""
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) for word in words):
        raise argparse.ArgumentTypeError(f"expected numbers from 1 on, like 3 or 1,2,3; got {text!r}")
    return tuple(dict.fromkeys(map(int, words)))
