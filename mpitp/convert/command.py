"""`mpitp convert`: a model of a foreign format to a Hugging Face directory."""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpitp.errors import UsageError
from mpitp.paths import input_path, path_option

DESCRIPTION = """\
Turn a GGUF file of the Llama family (architectures llama and qwen2; any quantisation that the gguf package reads) into
a Hugging Face directory: config.json, generation_config.json, model.safetensors, tokenizer.json with the chat template.
With --weights, round the matrices of such a file or of a Hugging Face directory to 8 or 4 bits, with one scale for
every 32 neighbours, to generate text from less memory and faster.
With --upcycle E, make a mixture of E experts (a Mixtral) of a Llama's or Mistral's directory: each expert begins as a
copy of the MLP, so that it writes what the dense model does until it is trained.
With --resize-vocabulary, give the tokens that were added to a directory's tokenizer rows in its model: each new row is
the mean of the others."""

EXAMPLES = """\
examples:
  mpitp convert SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2
  mpitp convert llama.gguf models/llama --dtype bfloat16
  mpitp convert --weights int8 models/llama models/llama-int8
  mpitp convert --upcycle 8 models/llama models/llama-8x
  mpitp convert --resize-vocabulary models/tagged models/tagged-grown
  mpitp generate --model models/smollm2 --prompt "The capital of France is"

Quantised weights are stored as the floats that they stand for, so a directory is larger than its GGUF file: 4 bytes a
weight as float32, 2 as bfloat16 or float16. --weights int8 takes 8.5 bits a weight, int4 4.5; a GGUF file's Q8_0 and
Q4_0 matrices keep their codes bit for bit, and so do its Q4_1 and Q4_K with int4, which then takes 6.
Rounded weights generate text; they can't be trained. `mpitp eval perplexity` tells what the rounding costs.
"""

BITS = {"int8": 8, "int4": 4}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line of `mpitp convert`."""
    parser.description, parser.epilog = DESCRIPTION, EXAMPLES
    parser.add_argument(
        "source",
        type=input_path,
        metavar="FILE.gguf|DIR",
        help="the file to convert, or, with --weights, --upcycle or --resize-vocabulary, a directory",
    )
    parser.add_argument("directory", type=path_option, metavar="DIR", help="the directory to make")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        default="float32",
        help="what weights are stored in (default float32, exact)",
    )
    parser.add_argument("--weights", choices=list(BITS), help="round the matrices to 8 or 4 bits")
    parser.add_argument("--upcycle", type=int, metavar="E", help="make a mixture of E experts of a dense model")
    parser.add_argument("--experts-per-token", type=int, metavar="K", help="of the E experts (default 2)")
    parser.add_argument(
        "--resize-vocabulary", action="store_true", help="give every token of the tokenizer a row in the model"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a model directory that is already there")


def run(args: argparse.Namespace) -> int:
    """Convert, with a progress bar on stderr."""
    if args.resize_vocabulary:
        return _resize(args)
    if args.upcycle is not None:
        return _upcycle(args)
    if args.experts_per_token is not None:
        raise UsageError("--experts-per-token is for --upcycle E; add it, or leave both out")
    if args.weights is not None:
        return _round(args)
    if Path(args.source).is_dir():
        raise UsageError(
            f"{args.source} is a directory; it is converted with --weights int8 or int4, --upcycle E or "
            "--resize-vocabulary"
        )
    config = _convert(args, args.directory)
    _say(args.directory, config, args.dtype)
    return 0


def _round(args: argparse.Namespace) -> int:
    """Round the matrices of a directory, or of the one that a GGUF file makes."""
    from mpitp.convert.gguf_file import GgufFile
    from mpitp.convert.gguf_groups import GgufGroups, has_least_values
    from mpitp.convert.rounding import bits_a_weight, round_weights
    from mpitp.files import scratch_beside
    from mpitp.ops.groupwise import Grouping
    from mpitp.progress_bar import progress_bar

    if args.dtype != "float32":
        raise UsageError(f"--dtype {args.dtype} is for floats; leave it out with --weights {args.weights}")
    grouping, source = Grouping(BITS[args.weights]), Path(args.source)
    with contextlib.ExitStack() as stack:
        kept: dict[str, Any] = {}
        if not source.is_dir():
            source = stack.enter_context(scratch_beside(Path(args.directory), ".mpitp-floats-")) / "model"
            made = _convert(args, str(source))
            file = GgufFile(args.source)
            if grouping.bits == 4 and has_least_values(file):
                grouping = replace(grouping, has_least=True)
                kept["kept"] = GgufGroups(file, made["head_dim"]).of
        bar = stack.enter_context(progress_bar("rounding", " weights", scale=True))
        told: dict[str, Any] = {"progress": bar.update, "start": bar.reset}
        config = round_weights(source, args.directory, grouping, overwrite=args.overwrite, **told, **kept)
    _say(args.directory, config, f"{args.weights}, {bits_a_weight(grouping):g} bits a weight of a matrix")
    return 0


def _upcycle(args: argparse.Namespace) -> int:
    """Make a mixture of experts of a dense model's directory."""
    from mpitp.convert.upcycling import upcycle

    if args.weights is not None:
        raise UsageError("--upcycle makes experts in floats, and those can't be rounded; leave out --weights")
    top_k = min(2, args.upcycle) if args.experts_per_token is None else args.experts_per_token
    if not 1 <= top_k <= args.upcycle:
        raise UsageError(
            f"--experts-per-token {top_k} of --upcycle {args.upcycle}: a token goes to one expert at least, and to no "
            "more than there are"
        )
    if not Path(args.source).is_dir():
        raise UsageError(f"--upcycle takes a Hugging Face directory, and {args.source} isn't one; convert it first")
    config = upcycle(args.source, args.directory, args.upcycle, top_k, dtype=args.dtype, overwrite=args.overwrite)
    _say(args.directory, config, f"{args.upcycle} experts, {top_k} a token, {args.dtype}")
    return 0


def _resize(args: argparse.Namespace) -> int:
    """Give added tokens rows."""
    from mpitp.convert.resizing import resize_vocabulary

    for option in ("upcycle", "weights", "experts_per_token"):
        if getattr(args, option) is not None:
            raise UsageError(f"--resize-vocabulary and --{option.replace('_', '-')} are two steps; take one at a time")
    if not Path(args.source).is_dir():
        raise UsageError(f"--resize-vocabulary takes a Hugging Face directory, and {args.source} isn't one")
    before, now = resize_vocabulary(args.source, args.directory, dtype=args.dtype, overwrite=args.overwrite)
    print(f"{args.directory}: {before} rows of the vocabulary became {now}, the new ones the mean of the others")
    return 0


def _convert(args: argparse.Namespace, directory: str) -> dict[str, Any]:
    from mpitp.convert.gguf_file import GgufFile
    from mpitp.convert.gguf_model import passed_over
    from mpitp.convert.gguf_to_hf import convert_gguf
    from mpitp.error_stream import tell
    from mpitp.progress_bar import progress_bar

    file = GgufFile(args.source)
    tell(passed_over(file))
    with progress_bar("converting", " weights", scale=True) as bar:
        config = convert_gguf(
            file,
            directory,
            dtype=args.dtype,
            overwrite=args.overwrite,
            progress=bar.update,
            start=bar.reset,
        )
    return config


def _say(directory: str, config: dict[str, Any], weights: str) -> None:
    print(
        f"{directory}: {config['model_type']}, {config['num_hidden_layers']} layers of {config['hidden_size']}, "
        f"{config['num_attention_heads']} heads on {config['num_key_value_heads']} KV heads, vocabulary of "
        f"{config['vocab_size']}, {weights}"
    )
