#!/usr/bin/env python3
"""Generation against llama.cpp, in turn with it: one text and many, one core and two, prompts, long texts, the start.

    python scripts/bench_peers.py FILE.gguf --peer-python PYTHON [--kinds float32,int8,int4] [--rounds 3] [--work DIR]

PYTHON has llama-cpp-python. Both sides read the same GGUF file: llama.cpp's f32, q8_0 and q4_0 files are made of it,
and ours in float32, int8 and int4 (once, in the work folder). Each side of each comparison is a process of its own (two
ranks against two threads), pinned to its cores; all take turns, and the least time of each counts. A time is that of
the least step of a turn. Prints one line for each comparison: ours, the peer's, how many times as fast ours is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PEER = ROOT / "mpitp" / "bench" / "peers" / "llama_cpp_decode.py"
KINDS = {"float32": "f32", "int8": "q8_0", "int4": "q4_0"}
PLACES = 4096
WORDS = "The history of the town begins with a bridge over the river that carried salt and wool to the markets"


class Side:
    """A process that generates when it is asked, on these cores."""

    def __init__(self, words: Sequence[str], cores: Sequence[int]) -> None:
        self.process = started(words, cores)
        self.told = self._answer()

    def ask(self, prompts: Sequence[Sequence[int]], tokens: int) -> dict[str, Any]:
        """Generate."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def end(self) -> None:
        """Let the process end."""
        self.process.communicate(timeout=60)

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise SystemExit(f"{self.process.args} ended early; its message is above")


def started(words: Sequence[str], cores: Sequence[int]) -> subprocess.Popen[str]:
    """Start a program on these cores, one BLAS thread a process, its modules compiled before as installed ones are."""
    settings = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": str(len(cores)), "PYTHONDONTWRITEBYTECODE": ""}
    return subprocess.Popen(
        list(words),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **settings},
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )


class Files:
    """The models of both sides, by kind."""

    def __init__(self, gguf: Path, work: Path, python: str) -> None:
        work.mkdir(parents=True, exist_ok=True)
        self.theirs = {kind: work / f"{name}.gguf" for kind, name in KINDS.items()}
        self.ours = {kind: work / kind for kind in KINDS}
        missing = {KINDS[kind]: str(path) for kind, path in self.theirs.items() if not path.exists()}
        if missing:
            subprocess.run([python, str(PEER), json.dumps({"model": str(gguf), "quantise": missing})], check=True)
        convert = [sys.executable, "-m", "mpitp", "convert"]
        for kind, path in self.ours.items():
            if not path.exists():
                words = [str(gguf)] if kind == "float32" else ["--weights", kind, str(self.ours["float32"])]
                subprocess.run([*convert, *words, str(path)], check=True, stdout=subprocess.DEVNULL)


def sides(
    files: Files, kind: str, cores: Sequence[int], args: argparse.Namespace, stack: ExitStack
) -> tuple[Side, Side]:
    """Ours and the peer's, of a kind of weights, on these cores."""
    told = {"model": str(files.ours[kind]), "texts": 16, "places": PLACES}
    words = [sys.executable, "-P", "-m", "mpitp.bench.engine_turns", json.dumps(told)]
    if len(cores) > 1:
        mpiexec = str(Path(sys.executable).with_name("mpiexec"))
        words = [mpiexec, "-n", str(len(cores)), "-bind-to", "core", *words]
    ours = Side(words, cores)
    stack.callback(ours.end)
    settings = {"model": str(files.theirs[kind]), "threads": len(cores), "texts": 16, "places": PLACES}
    settings["repacked"] = not args.peer_plain
    theirs = Side([args.peer_python, str(PEER), json.dumps(settings)], cores)
    stack.callback(theirs.end)
    return ours, theirs


def prompts(texts: int, length: int) -> list[list[int]]:
    """Token ids below 1,000, each text its own."""
    return [[(7 * i + 31 * n) % 997 + 3 for i in range(length)] for n in range(texts)]


def in_turn(pair: tuple[Side, Side], key: str, texts: int, length: int, tokens: int, rounds: int) -> list[float]:
    """The least seconds of both sides."""
    least = [float("inf")] * 2
    for _ in range(rounds):
        for place, side in enumerate(pair):
            least[place] = min(least[place], float(side.ask(prompts(texts, length), tokens)[key]))
    return least


def compared(what: str, tokens: int, seconds: Sequence[float]) -> str:
    """A line of two speeds."""
    ours, theirs = (tokens / value for value in seconds)
    return f"{what:<44}{ours:>9.1f}{theirs:>12.1f}{ours / theirs:>8.2f} x"


def of_kind(args: argparse.Namespace, files: Files, kind: str) -> Iterator[str]:
    """Lines of one kind of weights."""
    cores = [int(core) for core in args.cores.split(",")]
    with ExitStack() as stack:
        pair = sides(files, kind, cores[:1], args, stack)
        one = in_turn(pair, "seconds", 1, 32, 24, args.rounds)
        yield compared(f"{kind}, one core, one text, tokens/s", 1, one)
        many = in_turn(pair, "seconds", 16, 16, 9, args.rounds)
        yield compared(f"{kind}, one core, 16 texts, tokens/s", 16, many)
        yield f"{'  of one text':<44}{16 * one[0] / many[0]:>9.2f}{16 * one[1] / many[1]:>12.2f}"
        prefill = in_turn(pair, "prefill_seconds", 1, 512, 1, args.rounds)
        yield compared(f"{kind}, one core, prompt of 512, tokens/s", 512, prefill)
        if kind == args.long:
            behind = in_turn(pair, "seconds", 1, 2000, 17, max(2, args.rounds // 3))
            yield compared(f"{kind}, one core, behind 2,000 tokens", 1, behind)
            yield f"{'  of the speed behind 32 tokens':<44}{one[0] / behind[0]:>9.2f}{one[1] / behind[1]:>12.2f}"
        if len(cores) > 1:
            pair = sides(files, kind, cores[:2], args, stack)
            two = in_turn(pair, "seconds", 1, 32, 24, args.rounds)
            yield compared(f"{kind}, two cores, one text, tokens/s", 1, two)


def first_token(args: argparse.Namespace, files: Files, kind: str) -> str:
    """From the start of a process to its first token behind a prompt of 20, in seconds."""
    cores = [int(args.cores.split(",")[0])]
    generate = ["generate", "--model", str(files.ours[kind]), "--prompt", WORDS, "--max-new-tokens", "1"]
    settings = {"model": str(files.theirs[kind]), "threads": 1, "texts": 1, "places": 256}
    settings["repacked"] = not args.peer_plain
    least = [float("inf")] * 2
    for _ in range(args.rounds + 1):
        begun = time.perf_counter()
        started([sys.executable, "-P", "-m", "mpitp", *generate], cores).communicate()
        least[0] = min(least[0], time.perf_counter() - begun)
        begun = time.perf_counter()
        side = Side([args.peer_python, str(PEER), json.dumps(settings)], cores)
        side.ask(prompts(1, 20), 1)
        least[1] = min(least[1], time.perf_counter() - begun)
        side.end()
    return f"{kind + ', start to first token, seconds':<44}{least[0]:>9.2f}{least[1]:>12.2f}{least[0] / least[1]:>8.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--peer-python", required=True, help="the Python that has llama-cpp-python")
    parser.add_argument(
        "--peer-plain",
        action="store_true",
        help="llama.cpp leaves weights as they are in the file; for processors whose AMX units its build takes for "
        "usable and that aren't (it ends by an illegal instruction)",
    )
    parser.add_argument("--work", type=Path, default=ROOT / ".cache" / "peers", help="where models are put")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--long", default="float32", help="the kind that is measured behind 2,000 tokens; none: none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", default="0,1", help="the first is used alone too")
    args = parser.parse_args()
    files = Files(args.gguf, args.work, args.peer_python)
    print(f"{'':<44}{'ours':>9}{'llama.cpp':>12}", flush=True)
    for kind in args.kinds.split(","):
        for line in of_kind(args, files, kind):
            print(line, flush=True)
        print(first_token(args, files, kind), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
