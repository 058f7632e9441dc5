"""Damage the input of every reader, run what reads it, and count what came of it: see scripts/fuzz."""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

os.environ |= {"OPENBLAS_NUM_THREADS": "1", "MPITP_ACCELERATOR": "off", "TOKENIZERS_PARALLELISM": "false"}

from mpitp.cli import main  # noqa: E402  after the environment
from tests.fuzz.bases import make_bases  # noqa: E402
from tests.fuzz.case import Case, Reader
from tests.fuzz.isolated import Outcome, run_isolated  # noqa: E402
from tests.fuzz.readers import READERS  # noqa: E402

IMPORTED_ONCE = (
    "checkpoint.load comm.start data.prepare convert.gguf_to_hf infer.generate train.run verify.run trace.timeline"
)


class Fuzz:
    """All cases of one seed, in one folder."""

    def __init__(self, folder: Path, seed: int, keep: bool) -> None:
        self.folder, self.seed, self.keep = folder, seed, keep
        self.words = folder / "words"
        self.bases = folder / "bases"
        self.whole: dict[tuple[str, str], Any] = {}
        self.codes: dict[str, Counter[int]] = defaultdict(Counter)
        self.faults: list[str] = []
        self.peak_bytes = 0

    def prepare(self) -> None:
        """Make what is damaged later."""
        for place in (self.words, self.bases):
            place.mkdir()
        done = run_isolated(lambda: make_bases(self.bases) or 0, self.folder, self.words)
        if done.code:
            sys.exit(f"the whole inputs can't be made:\n{done.out}{done.err}")

    def case(self, reader: Reader, index: int) -> None:
        """One damaged input."""
        rng = random.Random(f"{self.seed} {reader.name} {index}")
        base = self.bases / rng.choice(reader.bases)
        case = self._copy(reader, base, f"{reader.name}-{index}")
        case.whole = self._whole(reader, base)
        reader.damage(rng, case)
        faults, code = self._run(reader, case)
        self.codes[reader.name][code] += 1
        if faults:
            name = f"--reader {reader.name} --seed {self.seed} --case {index}"
            self.faults.append(f"{name} ({base.name}, {case.told}): {'; '.join(faults)}")
            print(f"FAULT {self.faults[-1]}\n{self._end_of_words()}", flush=True)
        if not self.keep:
            shutil.rmtree(case.folder)

    def _copy(self, reader: Reader, base: Path, name: str) -> Case:
        folder = self.folder / name
        shutil.copytree(base, folder)
        commands = [command.split() for command in reader.commands]
        return Case(folder, base, [[word.replace("The_cat", "The cat") for word in words] for words in commands])

    def _whole(self, reader: Reader, base: Path) -> Any:
        """What the commands give for the whole input, which must be right."""
        if (reader.name, base.name) not in self.whole:
            case = self._copy(reader, base, f"{reader.name}-whole")
            faults, code = self._run(reader, case, is_whole=True)
            if faults or code:
                sys.exit(f"{reader.name}: the whole input of {base.name} fails: {faults}\n{self._end_of_words()}")
            self.whole[reader.name, base.name] = reader.result(case)
            shutil.rmtree(case.folder)
        return self.whole[reader.name, base.name]

    def _run(self, reader: Reader, case: Case, is_whole: bool = False) -> tuple[list[str], int]:
        """Run the case's commands until one fails: the faults seen, and the last exit code."""
        for place, words in enumerate(case.commands):
            outcome = self._isolated(lambda words=words: main(words), case)
            faults = outcome.faults((0, *reader.codes)) + _leftovers(case.folder)
            faults += ["memory without end"] if "MemoryError" in outcome.err and not reader.asks_for_sizes else []
            if faults or outcome.code:
                late = (
                    ["a later command refuses what the first one made"]
                    if place and outcome.code not in (0, 2, 5)
                    else []
                )
                return faults + late, outcome.code
            case.outputs.append(outcome.out)
        if is_whole:
            return [], 0
        checked = self._isolated(lambda: _tell(reader.check(case)), case)
        return ([f"the check failed: {checked.code}"] if checked.code else checked.out.splitlines()), 0

    def _isolated(self, action: Any, case: Case) -> Outcome:
        outcome = run_isolated(action, case.folder, self.words)
        self.peak_bytes = max(self.peak_bytes, outcome.peak_bytes)
        return outcome

    def _end_of_words(self) -> str:
        ends = [(self.words / name).read_text(errors="replace") for name in ("out", "err")]
        return "".join(f"    {line:.300}\n" for text in ends for line in text.splitlines()[-12:])

    def report(self) -> str:
        """A line for each reader, and the sum."""
        codes = sorted({code for counts in self.codes.values() for code in counts})
        lines = [f"{'exit code':12}" + "".join(f"{code:>7}" for code in codes)]
        for name, counts in self.codes.items():
            lines.append(f"{name:12}" + "".join(f"{counts[code]:>7}" for code in codes))
        cases = sum(sum(counts.values()) for counts in self.codes.values())
        lines.append(f"most memory of a case {self.peak_bytes / 2**20:.0f} MiB")
        lines.append(f"seed {self.seed}, cases {cases}, faults {len(self.faults)}")
        return "\n".join(lines)


def _tell(faults: list[str]) -> int:
    for fault in faults:
        print(fault.replace("\n", " "))
    return 0


def _leftovers(folder: Path) -> list[str]:
    return [f"{path.name} is left behind" for pattern in (".*.partial", ".*.old") for path in folder.rglob(pattern)]


def _import_everything() -> None:
    from importlib import import_module

    for name in IMPORTED_ONCE.split():
        import_module(f"mpitp.{name}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("scripts/fuzz", description=__doc__)
    parser.add_argument("cases", nargs="?", type=int, default=1000, help="of all readers together (default 1000)")
    parser.add_argument("--seed", type=int, help="decides every case (default: chosen, and printed)")
    parser.add_argument("--reader", action="append", choices=list(READERS), help="only this one; may be repeated")
    parser.add_argument("--case", type=int, help="only this case, as a fault's line names it")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after so many")
    parser.add_argument("--keep", action="store_true", help="leave the folders of the cases")
    return parser.parse_args()


def run() -> int:
    """The script."""
    args = _arguments()
    seed = int(time.time()) if args.seed is None else args.seed
    folder = Path(tempfile.mkdtemp(prefix="mpitp-fuzz-"))
    print(f"seed {seed}, in {folder}", flush=True)
    _import_everything()
    fuzz = Fuzz(folder, seed, args.keep)
    readers = [READERS[name] for name in args.reader or READERS]
    end = time.monotonic() + args.seconds
    try:
        fuzz.prepare()
        for number in range(args.cases if args.case is None else len(readers)):
            if time.monotonic() > end:
                break
            fuzz.case(readers[number % len(readers)], number // len(readers) if args.case is None else args.case)
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)
    print(fuzz.report())
    return 1 if fuzz.faults else 0


if __name__ == "__main__":
    sys.exit(run())
