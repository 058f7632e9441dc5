"""`mpitp generate`: continue prompts with a Hugging Face model, on any number of ranks."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mpitp.error_stream import ErrorStream
from mpitp.errors import FileError, UsageError
from mpitp.files import os_failure

if TYPE_CHECKING:
    from mpitp.comm.group import Group
    from mpitp.data.tokenizer import Tokenizer
    from mpitp.infer.generate import Completion, Speed
    from mpitp.models.model import CausalLM
    from mpitp.trace.tracer import Tracer

_DESCRIPTION = """\
Continue prompts with the model in a Hugging Face directory (as `mpitp train` and `mpitp convert` write them, or from
elsewhere). Text goes to stdout, everything else to stderr. The same seed gives the same text at every rank count."""

_EPILOG = """\
examples:
  mpitp generate --model runs/first/model --prompt "The capital of France is"
  mpitp launch -n 3 -- generate --model DIR --prompt "Once upon" --temperature 0.8 --top-p 0.95 --seed 7 --stream
  mpitp generate --model DIR --prompt "One" --prompt "A longer second one" --json
  cat prompts.txt | mpitp generate --model DIR --prompts - --json        one prompt a line

--json prints one object a prompt: prompt, text, tokens, finish_reason ("eos" or "length")."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `mpitp generate`."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("--model", required=True, metavar="DIR", help="Hugging Face directory with a tokenizer")
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    parser.add_argument("--prompts", metavar="FILE", help='a file with one prompt a line ("-": standard input)')
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="default 64")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default 0: the likeliest token")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="only the K likeliest tokens (0: all)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="only the likeliest, up to probability P")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="decides the text when T > 0; default 0")
    parser.add_argument("--stream", action="store_true", help="print the text as it comes (one prompt only)")
    parser.add_argument("--no-echo", action="store_true", help="print the continuation without the prompt")
    parser.add_argument("--json", action="store_true", help="one JSON object a prompt")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-text token")
    parser.add_argument("--tokens-per-second", action="store_true", help="print prefill and decode speed on stderr")
    parser.add_argument("--trace", metavar="OUT.JSON", help="write a timeline of all ranks, print the ledger on stderr")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32", help="to compute in")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="where arrays live")
    parser.add_argument("--invariant", action="store_true", help="the same bits at every rank count")
    parser.add_argument("--invariant-blocks", type=int, default=0, metavar="B", help="how many blocks (0: chosen)")


def run(args: argparse.Namespace) -> int:
    """Generate; every rank runs this, rank 0 prints."""
    from mpitp.checkpoint.load import load_config, load_model
    from mpitp.comm.start import start_job
    from mpitp.data.tokenizer import load_tokenizer
    from mpitp.infer.generate import Speed, generate
    from mpitp.infer.sampling import Sampling
    from mpitp.layers.layout import choose_blocks

    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    _check(args)
    group, device = start_job(args.device, invariant=args.invariant)
    prompts = _prompts(args, group)
    config, tokenizer = load_config(args.model), load_tokenizer(args.model)
    blocks = choose_blocks(args.invariant, args.invariant_blocks, config.heads)
    encoded = [tokenizer.encode(prompt) for prompt in prompts]
    tracer = _tracer(args)
    model_group = group if tracer is None else tracer.watch(group)
    model = load_model(args.model, model_group, dtype=args.dtype, device=device, invariant_blocks=blocks)
    if tracer is not None:
        tracer.attach(model)
    speed, printer = Speed(), Printer(args, tokenizer, prompts, is_speaker=group.rank == 0)
    eos_ids = () if args.ignore_eos else None
    if group.rank == 0:
        _say_shortened(args.max_new_tokens, encoded, config.max_positions)
    printer.begin()
    done = generate(model, encoded, args.max_new_tokens, sampling, eos_ids, printer.token, speed)
    printer.end(done)
    if args.tokens_per_second and group.rank == 0:
        _print_speed(speed, model)
    if tracer is not None:
        _finish_trace(tracer, group, args.trace)
    return 0


def _tracer(args: argparse.Namespace) -> Tracer | None:
    if not args.trace:
        return None
    from mpitp.trace.timeline import check_writable
    from mpitp.trace.tracer import Tracer

    check_writable(args.trace)
    return Tracer()


def _finish_trace(tracer: Tracer, group: Group, path: str) -> None:
    from mpitp.trace.timeline import finish

    trace = finish(tracer, group, path, "generate")
    if group.rank == 0:
        print(f"{trace}\n\ntimeline in {path}: open it in https://ui.perfetto.dev", file=ErrorStream())


class Printer:
    """What rank 0 writes to stdout; other ranks write nothing."""

    def __init__(self, args: argparse.Namespace, tokenizer: Tokenizer, prompts: list[str], *, is_speaker: bool) -> None:
        self.json, self.echo, self.tokenizer, self.prompts = args.json, not args.no_echo, tokenizer, prompts
        self.is_speaker = is_speaker
        self.stream = tokenizer.stream_decoder() if args.stream else None

    def begin(self) -> None:
        """The prompt, when the text is streamed behind it."""
        if self.stream is not None and self.echo:
            self._write(self.prompts[0])

    def token(self, index: int, token: int) -> None:
        """A new token: its whole characters are printed at once when streaming."""
        if self.stream is not None:
            self._write(self.stream.push(token))

    def end(self, completions: list[Completion]) -> None:
        """All that has not been printed yet."""
        if self.stream is not None:
            self._write(self.stream.flush() + "\n")
            return
        for index, (prompt, done) in enumerate(zip(self.prompts, completions, strict=True)):
            text = self.tokenizer.decode(done.tokens)
            if self.json:
                record = {"prompt": prompt, "text": text, "tokens": done.tokens, "finish_reason": done.finish_reason}
                self._write(json.dumps(record, ensure_ascii=False) + "\n")
            else:
                self._write(("\n" if index else "") + (prompt if self.echo else "") + text + "\n")

    def _write(self, text: str) -> None:
        if not self.is_speaker:
            return
        if sys.stdout is None:
            raise FileError("can't write to standard output: it is closed")
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except UnicodeEncodeError as error:
            letter = error.object[error.start]
            raise FileError(
                f"can't write {ascii(letter)} to standard output, whose encoding is {error.encoding}: choose a UTF-8 "
                "locale, or set PYTHONIOENCODING=utf-8"
            ) from error
        except BrokenPipeError:
            raise  # the reader has left, as in `mpitp ... | head`
        except OSError as error:
            raise os_failure("write to", "standard output", error) from error


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


def _prompts(args: argparse.Namespace, group: Group) -> list[str]:
    """The prompts; a file or standard input is read by rank 0 and broadcast."""
    if args.prompts is None:
        lines: list[str] | FileError = list(args.prompt)
    else:
        lines = group.broadcast_object(_read_lines(args.prompts) if group.rank == 0 else None)
    if isinstance(lines, FileError):
        raise lines
    for index, prompt in enumerate(lines):
        if not prompt:
            raise UsageError(f"prompt {index + 1} is empty; give it some text")
        if any("\ud800" <= character <= "\udfff" for character in prompt):
            raise UsageError(f"prompt {index + 1} is not UTF-8 text")
    return lines


def _read_lines(path: str) -> list[str] | FileError:
    """The lines of a file, or the error to be raised on every rank."""
    if path == "-" and sys.stdin is None:
        return FileError("can't read standard input: it is closed")
    try:
        raw = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        lines = raw.decode().splitlines()
    except OSError as error:
        return FileError(f"can't read {path}: {error.strerror}")
    except UnicodeDecodeError as error:
        return FileError(f"{path} is not UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}")
    return lines if lines else FileError(f"{path} holds no prompt; expected one a line")


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


def _print_speed(speed: Speed, model: CausalLM) -> None:
    def rate(tokens: int, seconds: float) -> str:
        return f"{tokens} tokens in {seconds:.2f} s ({tokens / seconds:.1f} tokens/s)" if tokens else "none"

    ranks = model.layout.group.size
    print(
        f"prefill: {rate(speed.prefill_tokens, speed.prefill_seconds)}; "
        f"decode: {rate(speed.decode_tokens, speed.decode_seconds)}; {ranks} rank{'s' * (ranks > 1)}",
        file=ErrorStream(),
    )
