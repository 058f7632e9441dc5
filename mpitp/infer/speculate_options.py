"""What `mpitp generate` and `mpitp serve` are told about speculation, and the model that drafts."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from mpitp.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from mpitp.backend.device import Device
    from mpitp.comm.group import Group
    from mpitp.data.tokenizer import Tokenizer
    from mpitp.infer.speculation import Speculation

LOOKUP, DRAFT = "lookup", "draft:"
MOST_TOKENS = 64


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """`--speculate` and `--speculate-tokens`."""
    parser.add_argument(
        "--speculate",
        metavar="HOW",
        help="try several next tokens in one step: lookup (what followed the last time in this text) or draft:DIR "
        "(what a small model says); the text stays the same",
    )
    parser.add_argument(
        "--speculate-tokens", type=int, default=3, metavar="K", help="tokens of a text tried at most; default 3"
    )


def check(args: argparse.Namespace) -> None:
    """Raise UsageError for what can't be."""
    how = args.speculate
    if how is not None and how != LOOKUP and not (how.startswith(DRAFT) and len(how) > len(DRAFT)):
        raise UsageError(f"--speculate must be lookup or draft:DIR, got {how!r}")
    if not 1 <= args.speculate_tokens <= MOST_TOKENS:
        raise UsageError(f"--speculate-tokens must lie in 1 .. {MOST_TOKENS}, got {args.speculate_tokens}")


def directory_of(args: argparse.Namespace) -> str | None:
    """Of the model that drafts; None: there is none."""
    how: str | None = args.speculate
    return how[len(DRAFT) :] if how is not None and how.startswith(DRAFT) else None


def make_speculation(
    args: argparse.Namespace, world: Group, device: Device, tokenizer: Tokenizer
) -> Speculation | None:
    """As `args` say, with the drafting model split over `world`; None: every step writes one token of a text.

    Raises ConfigError for a model with another tokenizer. What it drafts changes no text, so it is never invariant.
    """
    if args.speculate is None:
        return None
    from mpitp.infer.speculation import Speculation

    directory = directory_of(args)
    if directory is None:
        return Speculation(args.speculate_tokens)
    from mpitp.checkpoint.load import load_model
    from mpitp.data.tokenizer import load_tokenizer
    from mpitp.layers.site import make_site
    from mpitp.models.activations import round_activations

    if not tokenizer.has_ids_of(load_tokenizer(directory)):
        raise ConfigError(f"{directory} can't draft for {args.model}: its tokenizer has other tokens")
    draft = load_model(directory, make_site(world, dtype=args.dtype, device=device))
    round_activations(draft)
    return Speculation(args.speculate_tokens, draft)
