"""`mpitp convert`: a model of a foreign format to a Hugging Face directory."""

from __future__ import annotations

import argparse

DESCRIPTION = """\
Turn a GGUF file of the Llama family (architectures llama and qwen2; any quantisation that the gguf package reads) into
a Hugging Face directory: config.json, generation_config.json, model.safetensors, tokenizer.json with the chat template.
"""

EXAMPLES = """\
examples:
  mpitp convert SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2
  mpitp convert llama.gguf models/llama --dtype bfloat16
  mpitp generate --model models/smollm2 --prompt "The capital of France is"

Quantised weights are stored as the floats that they stand for, so a directory is larger than its GGUF file: 4 bytes a
weight as float32, 2 as bfloat16 or float16.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line of `mpitp convert`."""
    parser.description, parser.epilog = DESCRIPTION, EXAMPLES
    parser.add_argument("source", metavar="FILE.gguf", help="the file to convert")
    parser.add_argument("directory", metavar="DIR", help="the directory to make")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        default="float32",
        help="what weights are stored in (default float32, exact)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a model directory that is already there")


def run(args: argparse.Namespace) -> int:
    """Convert, with a progress bar on stderr."""
    from tqdm import tqdm

    from mpitp.convert.gguf_to_hf import convert_gguf
    from mpitp.error_stream import ErrorStream

    with tqdm(unit=" weights", unit_scale=True, desc="converting", file=ErrorStream()) as bar:
        config = convert_gguf(
            args.source,
            args.directory,
            dtype=args.dtype,
            overwrite=args.overwrite,
            progress=bar.update,
            start=bar.reset,
        )
    print(
        f"{args.directory}: {config['model_type']}, {config['num_hidden_layers']} layers of {config['hidden_size']}, "
        f"{config['num_attention_heads']} heads on {config['num_key_value_heads']} KV heads, vocabulary of "
        f"{config['vocab_size']}, {args.dtype}"
    )
    return 0
