"""`mpitp generate`: continue prompts with a Hugging Face model, on any number of ranks."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from mpitp.config import ACTIVATIONS, ACTIVATIONS_HELP, DTYPES
from mpitp.error_stream import ErrorStream, tell
from mpitp.errors import FileError, UsageError
from mpitp.infer import shares_option, speculate_options
from mpitp.infer.lines import from_words, is_surrogate, read_lines
from mpitp.infer.printer import Printer
from mpitp.paths import path_option

if TYPE_CHECKING:
    from mpitp.backend.device import Device
    from mpitp.comm.group import Group
    from mpitp.data.tokenizer import Tokenizer
    from mpitp.infer.generate import Drafts, OnToken, Speed
    from mpitp.infer.sampling import Sampling
    from mpitp.models.config import DecoderConfig
    from mpitp.models.model import CausalLM

BEAM_OPTIONS = ("beams", "length_penalty", "early_stopping")
_DESCRIPTION = """\
Continue prompts with the model in a Hugging Face directory (as `mpitp train` and `mpitp convert` write them, or from
elsewhere). Text goes to stdout, everything else to stderr. The same seed gives the same text at every rank count."""

_EPILOG = """\
examples:
  mpitp generate --model runs/first/model --prompt "The capital of France is"
  mpitp launch -n 3 -- generate --model DIR --prompt "Once upon" --temperature 0.8 --top-p 0.95 --seed 7 --stream
  mpitp generate --model DIR --prompt "One" --prompt "A longer second one" --json
  cat prompts.txt | mpitp generate --model DIR --prompts - --json        one prompt a line
  mpitp generate --model models/t5-small --prompt "translate English to German: ..." --beams 4

An encoder-decoder (T5, BART, Marian) reads the prompt and prints its own text alone, as generation_config.json says.

--json prints one object a prompt: prompt, text, tokens, finish_reason ("eos" or "length")."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `mpitp generate`."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument(
        "--model", required=True, type=path_option, metavar="DIR", help="Hugging Face directory with a tokenizer"
    )
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    parser.add_argument(
        "--prompts", type=path_option, metavar="FILE", help='a file with one prompt a line ("-": standard input)'
    )
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="default 64")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default 0: the likeliest token")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="only the K likeliest tokens (0: all)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="only the likeliest, up to probability P")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="decides the text when T > 0; default 0")
    _add_beams(parser)
    parser.add_argument("--stream", action="store_true", help="print the text as it comes (one prompt only)")
    parser.add_argument("--no-echo", action="store_true", help="print the continuation without the prompt")
    parser.add_argument("--json", action="store_true", help="one JSON object a prompt")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-text token")
    parser.add_argument(
        "--tokens-per-second", "--stats", action="store_true", help="print prefill and decode speed on stderr"
    )
    speculate_options.add_arguments(parser)
    parser.add_argument(
        "--trace",
        type=path_option,
        metavar="OUT.JSON",
        help="write a timeline of all ranks, print the ledger on stderr",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of weights and activations")
    parser.add_argument("--activations", choices=ACTIVATIONS, default="auto", help=ACTIVATIONS_HELP)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="where arrays live")
    parser.add_argument("--invariant", action="store_true", help="the same bits at every rank count")
    parser.add_argument("--invariant-blocks", type=int, default=0, metavar="B", help="how many blocks (0: chosen)")
    shares_option.add_argument(parser)


def _add_beams(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--beams",
        type=int,
        metavar="N",
        help="encoder-decoders: search with N beams; default: as the model's files say",
    )
    parser.add_argument(
        "--length-penalty", type=float, metavar="L", help="of beams: above 0 long texts gain; default 1"
    )
    parser.add_argument(
        "--early-stopping", choices=("false", "true", "never"), help="of beams: when they stop; default false"
    )


def run(args: argparse.Namespace) -> int:
    """Generate; every rank runs this, rank 0 prints."""
    from mpitp.checkpoint.hf_directory import read_config
    from mpitp.comm.agreement import agree, call_facts
    from mpitp.comm.start import start_job
    from mpitp.infer.sampling import Sampling
    from mpitp.models.activations import refuse_rounding
    from mpitp.models.kinds import is_encoder_decoder

    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    _check(args)
    group, device = start_job(args.device, invariant=args.invariant, accelerate=False)
    agree(group, lambda: call_facts("generate", args, ["model"]) | _model_facts(args))
    prompts = _prompts(args, group)
    if is_encoder_decoder(read_config(args.model)):
        from mpitp.infer.translate_command import run_pairs

        refuse_rounding(args.activations)
        return run_pairs(args, prompts, sampling, group, device)
    _refuse_beams(args)
    return _run_decoder(args, prompts, sampling, group, device)


def _run_decoder(args: argparse.Namespace, prompts: list[str], sampling: Sampling, group: Group, device: Device) -> int:
    from mpitp.checkpoint.load import load_config
    from mpitp.data.tokenizer import check_rows, load_tokenizer
    from mpitp.infer.generate import Follower, generate
    from mpitp.infer.traced import finish_trace, make_tracer
    from mpitp.models.ends import TOKENIZER, notices_of, with_ends

    config = load_config(args.model)  # refused first where it is another kind of model
    tokenizer = load_tokenizer(args.model)
    config = with_ends(config, TOKENIZER, tokenizer.eos_ids)
    encoded = [tokenizer.encode(prompt) for prompt in prompts]
    check_rows(tokenizer, encoded, config.vocab_size, args.model)
    tracer = make_tracer(args.trace)
    world = group if tracer is None else tracer.watch(group)
    model = _load(args, config, world, device)
    speculation = speculate_options.make_speculation(args, world, device, tokenizer)
    if tracer is not None:
        tracer.attach(model)
    printer = Printer(args, tokenizer, prompts, encoded, is_speaker=group.rank == 0)
    if group.rank == 0:
        tell(notices_of(config))
        _say_shortened(args.max_new_tokens, encoded, config.cached_positions)
    eos_ids = () if args.ignore_eos else None
    printer.begin()
    with _kernels(args, group, encoded, printer.token) as on_token:
        follower = Follower(on_token)
        done = generate(model, encoded, args.max_new_tokens, sampling, eos_ids, follower, world, speculation)
    printer.end(done)
    if group.rank == 0:
        tell(_textless(tokenizer, [token for text in done for token in text.tokens], config.vocab_size))
        if args.tokens_per_second:
            _print_speed(follower.speed, group.size, None if speculation is None else follower.speed.drafts)
    finish_trace(tracer, group, args.trace)
    return 0


def _refuse_beams(args: argparse.Namespace) -> None:
    """Raise UsageError for options of beams with a model that continues text."""
    for option in BEAM_OPTIONS:
        if getattr(args, option) is not None:
            raise UsageError(
                f"--{option.replace('_', '-')} goes with models that have an encoder and a decoder; {args.model} "
                "continues text: leave it out"
            )


def _model_facts(args: argparse.Namespace) -> dict[str, str]:
    """What the directories hold."""
    from mpitp.checkpoint.load import model_facts

    draft = speculate_options.directory_of(args)
    return model_facts("--model", args.model) | ({} if draft is None else model_facts("--speculate", draft))


def _load(args: argparse.Namespace, config: DecoderConfig, world: Group, device: Device) -> CausalLM:
    """The model, split over `world` as the arguments say."""
    from mpitp.checkpoint.load import load_model
    from mpitp.layers.site import choose_blocks, make_site
    from mpitp.models.activations import round_activations

    blocks = choose_blocks(args.invariant, args.invariant_blocks, config.heads)
    mesh = shares_option.mesh_of(args, world, device, config.hidden_size)
    site = make_site(mesh, dtype=args.dtype, device=device, invariant_blocks=blocks)
    model = load_model(args.model, site, config=config, in_place=True)
    round_activations(model, args.activations)
    return model


def _kernels(
    args: argparse.Namespace, group: Group, encoded: list[list[int]], on_token: OnToken
) -> AbstractContextManager[OnToken]:
    """The compiled kernels, now or behind the first token; what is told of tokens then."""
    from mpitp.infer.late_kernels import is_late, late_kernels

    if is_late(group, encoded, invariant=args.invariant):
        return late_kernels(group, on_token, args.max_new_tokens)
    return nullcontext(on_token)


def _textless(tokenizer: Tokenizer, tokens: list[int], vocab_size: int) -> list[str]:
    """A line where ids were chosen that stand for nothing: the text lacks them without a trace."""
    found = [token for token in tokens if not tokenizer.has_token(token)]
    if not found:
        return []
    ids = ", ".join(map(str, sorted(set(found))[:5])) + (", ..." if len(set(found)) > 5 else "")
    return [
        f"{len(found)} of the {len(tokens)} new tokens are ids that no token of the tokenizer has ({ids}), so no text "
        f"comes of them: the model has a vocabulary of {vocab_size}, the tokenizer of {tokenizer.vocab_size}"
    ]


def _check(args: argparse.Namespace) -> None:
    if args.prompt and args.prompts:
        raise UsageError("give prompts by --prompt or by --prompts, not by both")
    if not args.prompt and not args.prompts:
        raise UsageError('no prompt was given; give --prompt "TEXT", or --prompts FILE')
    if args.max_new_tokens < 1:
        raise UsageError(f"--max-new-tokens must be at least 1, got {args.max_new_tokens}")
    if args.stream and (args.json or len(args.prompt) > 1 or args.prompts):
        raise UsageError("--stream prints one text as it comes; it goes with a single --prompt and without --json")
    if not 0 <= args.seed < 2**63:
        raise UsageError(f"--seed must lie in 0 .. 2^63 - 1, got {args.seed}")
    speculate_options.check(args)
    if args.speculate and args.trace:
        raise UsageError("--trace shows steps of one token each; leave out --speculate")


def _prompts(args: argparse.Namespace, group: Group) -> list[str]:
    """The prompts; a file or standard input is read by rank 0 and broadcast."""
    if args.prompts is None:
        lines: list[str] | FileError = [from_words(prompt) for prompt in args.prompt]
    else:
        lines = group.broadcast_object(read_lines(args.prompts, "prompt") if group.rank == 0 else None)
    if isinstance(lines, FileError):
        raise lines
    for index, prompt in enumerate(lines):
        if not prompt:
            raise UsageError(f"prompt {index + 1} is empty; give it some text")
        if any(map(is_surrogate, prompt)):
            raise UsageError(f"prompt {index + 1} is not UTF-8 text")
    return lines


def _say_shortened(max_new_tokens: int, encoded: list[list[int]], positions: int) -> None:
    """Tell of texts that the model's positions will end early."""
    for index, prompt in enumerate(encoded):
        room = positions - len(prompt) + 1  # the last token need not be fed back
        if 0 < room < max_new_tokens:
            print(
                f"mpitp: prompt {index + 1} has {len(prompt)} of the model's {positions} positions: "
                f"at most {room} new tokens",
                file=ErrorStream(),
            )


def _print_speed(speed: Speed, ranks: int, drafts: Drafts | None) -> None:
    def rate(tokens: int, seconds: float) -> str:
        return f"{tokens} tokens in {seconds:.2f} s ({tokens / seconds:.1f} tokens/s)" if tokens else "none"

    print(
        f"prefill: {rate(speed.prefill_tokens, speed.prefill_seconds)}; "
        f"decode: {rate(speed.decode_tokens, speed.decode_seconds)}; {ranks} rank{'s' * (ranks > 1)}",
        file=ErrorStream(),
    )
    if drafts is not None:
        each = (drafts.steps + drafts.right) / max(1, drafts.steps)
        print(
            f"speculation: {drafts.right} of {drafts.tried} drafts were right; {each:.2f} tokens of a text a step",
            file=ErrorStream(),
        )
