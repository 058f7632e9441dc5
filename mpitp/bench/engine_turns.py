"""Greedy generation by our engine in a process of its own, or in several ranks, driven as the peers are.

    python -m mpitp.bench.engine_turns '{"model": "DIR", "texts": 16, "places": 1024}'

Questions and answers: see `peers/llama_cpp_decode.py`. Between two questions all ranks sleep.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from mpitp.backend.malloc import keep_blocks_in_heap
from mpitp.checkpoint.load import load_model
from mpitp.comm.start import join_ranks
from mpitp.infer.blocks import BLOCK
from mpitp.infer.engine import Engine
from mpitp.infer.executor import Executor
from mpitp.infer.requests import SILENT, Request
from mpitp.infer.sampling import Sampling
from mpitp.infer.schedule import Limits
from mpitp.layers.site import make_site
from mpitp.models.activations import round_activations

ROWS = 512  # of a step, as llama.cpp's batch


def answer(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int) -> dict[str, Any]:
    """Generate exactly `tokens` tokens for every prompt; times of the steps in which all of them go on."""
    first = engine.submit(Request(prompts[0], tokens, SILENT, Sampling()))
    for prompt in prompts[1:]:
        engine.submit(Request(prompt, tokens, SILENT, Sampling()))
    texts: list[list[int]] = [[] for _ in prompts]
    started = before = time.perf_counter()
    prefilled, steps = 0.0, []
    while engine.step():
        now = time.perf_counter()
        for number, token, _ in engine.told:
            texts[number - first].append(token)
        if prefilled and len(engine.told) == len(prompts):
            steps.append(now - before)
        if not prefilled and all(texts):
            prefilled = now - started
        before = now
    engine.tell_rest()
    return {"seconds": min(steps, default=0.0), "prefill_seconds": prefilled, "tokens": texts}


def main() -> int:
    """Answer until standard input ends."""
    keep_blocks_in_heap()  # as the command line does
    settings = json.loads(sys.argv[1])
    group = join_ranks()
    model = load_model(settings["model"], make_site(group))
    round_activations(model)
    executor = Executor(model, settings["places"] // BLOCK, group)
    if group.rank:
        executor.follow()
        return 0
    engine = Engine(executor, Limits(settings["texts"], ROWS), files=False)
    print(json.dumps({"ready": "mpitp"}), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        print(json.dumps(answer(engine, question["prompts"], question["tokens"])), flush=True)
    engine.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
