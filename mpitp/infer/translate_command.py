"""`mpitp generate` with an encoder-decoder: prompts are sources, and what is printed is the text made of each."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from mpitp.backend.device import Device
from mpitp.checkpoint.encoder_decoder import load_encoder_decoder, load_encoder_decoder_config
from mpitp.checkpoint.hf_directory import read_generation_config
from mpitp.comm.group import Group
from mpitp.data.tokenizer import Tokenizer, check_fits, check_rows, load_tokenizer
from mpitp.error_stream import tell
from mpitp.errors import FileError, UsageError
from mpitp.infer import shares_option
from mpitp.infer.beams import BeamSettings
from mpitp.infer.generate import Completion
from mpitp.infer.lines import takes_every_letter, write_out
from mpitp.infer.rules import Rules, read_rules
from mpitp.infer.sampling import Sampling
from mpitp.infer.traced import finish_trace, make_tracer
from mpitp.infer.translate import translate
from mpitp.layers.site import choose_blocks, make_site


def run_pairs(args: argparse.Namespace, prompts: list[str], sampling: Sampling, group: Group, device: Device) -> int:
    """Every rank runs this, rank 0 prints."""
    for option in ("stream", "tokens_per_second", "speculate"):
        if getattr(args, option):
            raise UsageError(
                f"--{option.replace('_', '-')} is not supported with an encoder and a decoder; leave it out"
            )
    config, tokenizer = load_encoder_decoder_config(args.model), load_tokenizer(args.model)
    check_fits(tokenizer, config.vocab_size, args.model)
    encoded = tokenizer.encode_all(prompts)
    check_rows(tokenizer, encoded, config.vocab_size, args.model)
    rules = _rules(args, read_rules(config, read_generation_config(args.model)), sampling)
    blocks = choose_blocks(args.invariant, args.invariant_blocks, config.heads)
    tracer = make_tracer(args.trace)
    world = group if tracer is None else tracer.watch(group)
    mesh = shares_option.mesh_of(args, world, device, config.hidden_size)
    site = make_site(mesh, dtype=args.dtype, device=device, invariant_blocks=blocks)
    model = load_encoder_decoder(args.model, site, config=config)
    if tracer is not None:
        tracer.attach(model)
    done = translate(model, encoded, args.max_new_tokens, rules, sampling, world)
    refusal = None
    if group.rank == 0:
        tell(config.notices)
        refusal = _print(args, tokenizer, prompts, done)
    finish_trace(tracer, group, args.trace)
    refusal = group.broadcast_object(refusal)
    if refusal is not None:
        raise refusal
    return 0


def _rules(args: argparse.Namespace, rules: Rules, sampling: Sampling) -> Rules:
    """Those of the files, and what the command line says instead."""
    beams = rules.beams
    count = args.beams if args.beams is not None else 1 if sampling.temperature else beams.count
    penalty = beams.length_penalty if args.length_penalty is None else args.length_penalty
    words: dict[str, bool | str] = {"false": False, "true": True, "never": "never"}
    early = beams.early if args.early_stopping is None else words[args.early_stopping]
    ends = () if args.ignore_eos else rules.ends
    return dataclasses.replace(rules, beams=BeamSettings(count, penalty, early), ends=ends)


def _print(
    args: argparse.Namespace, tokenizer: Tokenizer, prompts: list[str], completions: list[Completion]
) -> FileError | None:
    """Print the texts, one a line; the error that must be raised on every rank."""
    try:
        for prompt, done in zip(prompts, completions, strict=True):
            text = tokenizer.decode(done.tokens)
            if args.json:
                record = {"prompt": prompt, "text": text, "tokens": done.tokens, "finish_reason": done.finish_reason}
                write_out(json.dumps(record, ensure_ascii=not takes_every_letter(sys.stdout)) + "\n")
            else:
                write_out(text + "\n")
    except FileError as error:
        return error
    return None
