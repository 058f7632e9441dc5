"""`mpitp data`: texts to token files, and a look at them."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpitp.data.tokenizer import Tokenizer

from mpitp.paths import input_path, path_option

DESCRIPTION = """\
Turn plain UTF-8 texts into memory-mapped token files for training, and show what such files hold.
"""

EXAMPLES = """\
examples:
  mpitp data prepare book.txt --tokenizer bytes --out data --valid-fraction 0.05
  mpitp data show data/train
"""

PREPARE = """\
Tokenize texts into a directory that `mpitp train` reads ([data] train = "DIR"). Each text is one document and ends in
the tokenizer's end-of-text token. The directory holds tokens.bin, manifest.json and the tokenizer itself.
"""

PREPARE_EXAMPLES = """\
examples:
  mpitp data prepare book.txt --tokenizer bytes --out data
  mpitp data prepare *.txt --tokenizer models/smollm2 --out data --valid-fraction 0.05
      makes data/train and data/valid (the last 5 % of the tokens)

--tokenizer bytes: ids 0 to 255 are the bytes of the text, 256 ends a text; needs nothing and suits small experiments.
--tokenizer DIR: a Hugging Face directory with tokenizer.json.
Where a text spells a special token, such as <|endoftext|>, it becomes that token, and how often is said;
--plain-specials keeps the letters.
"""

SHOW = """\
Print the manifest of prepared data and its first tokens as text.
"""

SHOW_EXAMPLES = """\
examples:
  mpitp data show data/train
  mpitp data show data/train --tokens 200 --check
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line of `mpitp data`."""
    parser.description, parser.epilog = DESCRIPTION, EXAMPLES
    actions = parser.add_subparsers(dest="action", required=True, metavar="prepare|show")
    raw = argparse.RawDescriptionHelpFormatter
    prepare = actions.add_parser(
        "prepare", help="texts to token files", description=PREPARE, epilog=PREPARE_EXAMPLES, formatter_class=raw
    )
    prepare.add_argument("texts", nargs="+", type=input_path, metavar="TEXT", help="a plain text file, UTF-8")
    prepare.add_argument(
        "--tokenizer",
        required=True,
        type=path_option,
        metavar="DIR|bytes",
        help='"bytes", or a directory with tokenizer.json',
    )
    prepare.add_argument("--out", required=True, type=path_option, metavar="DIR", help="the directory to make")
    prepare.add_argument(
        "--valid-fraction", type=float, default=0.0, metavar="X", help="hold out this part of the tokens"
    )
    prepare.add_argument(
        "--plain-specials", action="store_true", help="the spelling of a special token in a text stays text"
    )
    prepare.add_argument("--overwrite", action="store_true", help="replace prepared data that is already there")
    show = actions.add_parser(
        "show", help="what is in them", description=SHOW, epilog=SHOW_EXAMPLES, formatter_class=raw
    )
    show.add_argument("directory", type=path_option, metavar="DIR", help="prepared data")
    show.add_argument("--tokens", type=int, default=64, metavar="N", help="how many tokens to decode (default 64)")
    show.add_argument("--check", action="store_true", help="read the whole file and compare its checksum")


def run(args: argparse.Namespace) -> int:
    """Carry out `prepare` or `show`."""
    return _prepare(args) if args.action == "prepare" else _show(args)


def _prepare(args: argparse.Namespace) -> int:
    from mpitp.data.prepare import Specials, check_texts, prepare
    from mpitp.data.tokenizer import tokenizer_from
    from mpitp.error_stream import ErrorStream

    texts = [Path(text) for text in args.texts]
    total = check_texts(texts)
    tokenizer = tokenizer_from(args.tokenizer)
    specials = Specials(args.plain_specials)
    with Progress(total) as progress:
        parts = prepare(
            texts,
            tokenizer,
            Path(args.out),
            valid_fraction=args.valid_fraction,
            overwrite=args.overwrite,
            specials=specials,
            progress=progress.update,
        )
    if specials.counts:
        print(_spelled_message(tokenizer, specials.counts), file=ErrorStream())
    for part, manifest in parts.items():
        where = Path(args.out) / part
        print(f"{where}: {manifest.num_tokens} tokens ({manifest.dtype}), vocabulary of {manifest.vocab_size}")
    return 0


def _spelled_message(tokenizer: Tokenizer, spelled: Counter[int]) -> str:
    counts = ", ".join(f"{tokenizer.special_tokens[i]} ({count})" for i, count in spelled.most_common())
    return (
        f"mpitp: where the texts spell special tokens they became these tokens: {counts}; --plain-specials keeps the "
        "letters"
    )


class Progress:
    """A progress bar on stderr that appears with the first bytes: what fails before them is an error and no more."""

    def __init__(self, total_bytes: int) -> None:
        self._total = total_bytes
        self._bar: Any = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, num_bytes: int) -> None:
        """So many more bytes have been read."""
        from mpitp.progress_bar import progress_bar

        if self._bar is None and num_bytes:
            self._bar = progress_bar("tokenizing", "B", self._total, scale=True)
        if self._bar is not None:
            self._bar.update(num_bytes)


def _show(args: argparse.Namespace) -> int:
    import json
    from dataclasses import asdict

    from mpitp.data.token_file import TokenFile
    from mpitp.errors import UsageError

    if args.tokens < 0:
        raise UsageError(f"--tokens {args.tokens}: expected a whole number of at least 0")
    tokens = TokenFile(args.directory)
    if args.check:
        tokens.check_sum()
    print(json.dumps(asdict(tokens.manifest), indent=2))
    ids = tokens.read(0, min(args.tokens, len(tokens)))
    print(tokens.load_tokenizer().decode(ids, skip_special_tokens=False))
    return 0
