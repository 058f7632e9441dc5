"""`mpitp bench serve`: many texts together against one, and the server against the bare engine.

All of it runs on one engine, in turn: one text; N texts at once; the same N asked for over HTTP by clients in a process
of their own. Times run from the first text's beginning to the last one's end, prompts included. Then, in steps: how
long a short prompt waits for its first token while the others run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from mpitp.bench.decode import model_of
from mpitp.bench.machine import machine_facts
from mpitp.bench.sizes import describe
from mpitp.bench.timing import Samples, take_turns
from mpitp.bench.train import num_params
from mpitp.comm.group import Group
from mpitp.comm.serial import SerialGroup
from mpitp.data.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer
from mpitp.errors import LaunchError
from mpitp.infer.blocks import blocks_of
from mpitp.infer.engine import Engine
from mpitp.infer.executor import Executor
from mpitp.infer.requests import SILENT, Request
from mpitp.infer.sampling import Sampling
from mpitp.infer.schedule import Limits

MOST_SECONDS = 600.0
SHORT_PROMPT = 8  # tokens


def measure(args: argparse.Namespace, group: Group) -> dict[str, Any]:
    """All numbers of the benchmark, equal on every rank."""
    _require_extra()
    model = model_of(args, group)
    machine = machine_facts(group)
    # a text comes in where a block more is free for each that runs
    executor = Executor(model, args.texts * (blocks_of(args.prompt + args.tokens) + 1), group)
    facts = None
    if group.rank:
        executor.follow()
    else:
        engine = Engine(executor, Limits(args.texts, max(256, 2 * args.texts)), files=False)
        tokenizer = byte_tokenizer() if args.model is None else load_tokenizer(args.model)
        facts = _facts(args, _measured(args, engine, tokenizer), machine)
        facts["steps_to_first_token"] = _steps_to_first_token(
            engine, _prompts(args, model.config.vocab_size), args.tokens
        )
        facts["model"] = describe(model.config, num_params(model))
        engine.end()
    told: dict[str, Any] = group.broadcast_object(facts)
    return told | {"ranks": group.size}


def _require_extra() -> None:
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise LaunchError(f"bench serve needs {error.name}: pip install 'mpitp[serve]'") from error


def _measured(args: argparse.Namespace, engine: Engine, tokenizer: Tokenizer) -> Samples:
    prompts = _prompts(args, engine.executor.model.config.vocab_size)
    tasks: dict[str, Callable[[], float]] = {
        "one": lambda: _alone(engine, prompts[:1], args.tokens),
        "many": lambda: _alone(engine, prompts, args.tokens),
        "server": lambda: _over_http(engine, tokenizer, prompts, args.tokens),
    }
    return take_turns(tasks, args.rounds, SerialGroup(), "bench serve")


def _prompts(args: argparse.Namespace, vocab_size: int) -> list[list[int]]:
    drawn: list[list[int]] = (
        np.random.default_rng(3).integers(0, min(256, vocab_size), (args.texts, args.prompt)).tolist()
    )
    return drawn


def _alone(engine: Engine, prompts: list[list[int]], tokens: int) -> float:
    """Seconds of these texts on the bare engine."""
    started = time.perf_counter()
    for prompt in prompts:
        engine.submit(Request(prompt, tokens, SILENT, Sampling()))
    while engine.step():
        pass
    return time.perf_counter() - started


def _steps_to_first_token(engine: Engine, prompts: list[list[int]], tokens: int) -> int:
    """In how many steps the last of these texts, a short one, has its first token when all others run already."""
    running = {engine.submit(Request(prompt, tokens, SILENT, Sampling())) for prompt in prompts[:-1]}
    begun: set[int] = set()
    while begun < running and engine.step():
        begun |= {number for number, _, _ in engine.told}
    late = engine.submit(Request(prompts[-1][:SHORT_PROMPT], 1, SILENT, Sampling()))
    steps, is_there = 0, False
    while engine.step():
        steps += not is_there
        is_there = is_there or any(number == late for number, _, _ in engine.told)
    return steps


def _over_http(engine: Engine, tokenizer: Tokenizer, prompts: list[list[int]], tokens: int) -> float:
    """Seconds of the same texts, each streamed to a client."""
    from mpitp.serve.application import ServerLimits, make_application
    from mpitp.serve.service import Service
    from mpitp.serve.shield import ShieldSettings
    from mpitp.serve.web import WebThread, listen

    web, listening = WebThread(), listen("127.0.0.1", 0)
    service = Service(engine, 2 * len(prompts), web.deliver)
    limits = ServerLimits(tokens, 2 * len(prompts), MOST_SECONDS)
    web.start(make_application(service, tokenizer, "bench", limits, ShieldSettings(), lambda line: None), listening)
    found: list[subprocess.CompletedProcess[str]] = []
    words = [sys.executable, "-P", "-m", "mpitp.bench.serve_clients", str(listening.getsockname()[1])]
    question = json.dumps({"prompts": prompts, "tokens": tokens})

    def clients() -> None:
        found.append(subprocess.run(words, input=question, capture_output=True, text=True, timeout=MOST_SECONDS))
        service.drain()

    threading.Thread(target=clients, daemon=True).start()
    service.run()
    web.stop()
    if found[0].returncode:
        raise LaunchError(f"the clients of bench serve failed: {found[0].stderr.strip()[-500:]}")
    return float(found[0].stdout)


def _facts(args: argparse.Namespace, samples: Samples, machine: dict[str, Any]) -> dict[str, Any]:
    new = {"one": args.tokens, "many": args.texts * args.tokens, "server": args.texts * args.tokens}
    speed = {name: {"best": n / samples.least(name), "median": n / samples.median(name)} for name, n in new.items()}
    gain = [args.texts * value for value in samples.ratio("one", "many")]
    of_engine = samples.ratio("many", "server")
    return {
        "machine": machine,
        "rounds": args.rounds,
        "texts": args.texts,
        "prompt_tokens": args.prompt,
        "new_tokens": args.tokens,
        "tokens_per_second": speed,
        "many_to_one": dict(zip(("least", "median"), gain, strict=True)),
        "server_of_engine": dict(zip(("least", "median"), of_engine, strict=True)),
    }


def report(facts: dict[str, Any]) -> list[str]:
    """The lines to print."""
    gain, share = facts["many_to_one"], facts["server_of_engine"]
    lines = [
        facts["model"],
        f"prompts of {facts['prompt_tokens']} tokens, {facts['new_tokens']} new ones, greedy; {facts['ranks']} rank"
        f"{'s' * (facts['ranks'] > 1)}, {facts['rounds']} rounds, all in turn",
        "",
    ]
    for name, words in (("one", "one text"), ("many", f"{facts['texts']} texts"), ("server", "the same by HTTP")):
        speed = facts["tokens_per_second"][name]
        lines.append(f"{words:>18}: {speed['best']:8.1f} tokens/s (median {speed['median']:.1f})")
    together = f"{facts['texts']} texts together: {gain['least']:.2f} times the tokens/s of one"
    served = f"the server gives {share['least']:.2f} of the bare engine's tokens/s"
    first = f"a short prompt that comes while {facts['texts'] - 1} texts run: first token after "
    first += f"{facts['steps_to_first_token']} step{'s' * (facts['steps_to_first_token'] != 1)}"
    medians = [f" (median of paired ratios {ratios['median']:.2f})" for ratios in (gain, share)]
    return [*lines, "", together + medians[0], served + medians[1], first]
