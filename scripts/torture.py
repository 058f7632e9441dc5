"""Kill, stop, starve and damage training runs, and see that none loses anything: see scripts/torture.

A run in invariant mode has the same losses, to the last digit, in any layout of ranks along tp, dp (with ZeRO-1) and
pp; so each round resumes in another one, and every line of the loss log is compared with that of a run that was never
disturbed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STEPS = 60
MOST_SECONDS = 10.0  # from a rank's death until the job has ended
TRIAL_SECONDS = 240.0  # for a job that isn't killed, and for its first checkpoint: a slow machine isn't a lost run
TEXT = "Weep not for what is killed in haste; what was written whole can be read whole, and read again. " * 40
RUN_FILE = """\
[model]
model_type = "llama"
hidden_size = 48
num_hidden_layers = 2
num_attention_heads = 6
num_key_value_heads = 3
intermediate_size = 101
max_position_embeddings = 32
attention_dropout = 0.1
tie_word_embeddings = true
[data]
train = "{folder}/data/train"
valid = "{folder}/data/valid"
seq_len = 16
valid_sequences = 4
[train]
steps = {steps}
global_batch_size = 4
micro_batch_size = 1
eval_every = 10
invariant = true
run_dir = "{run}"
[optim]
lr = 3e-3
[checkpoint]
every = 1
keep = 2
"""


LAYOUTS: tuple[tuple[int, dict[str, int]], ...] = (
    (1, {}),
    (2, {"mesh.tp": 2}),
    (2, {"mesh.dp": 2}),
    (2, {"mesh.dp": 2, "optim.zero": 1}),
    (2, {"mesh.pp": 2}),
    (3, {"mesh.tp": 3}),
    (3, {"mesh.dp": 3, "optim.zero": 1}),
    (4, {"mesh.dp": 2, "mesh.tp": 2, "optim.zero": 1}),
    (4, {"mesh.dp": 2, "mesh.pp": 2}),
)


class Lost(Exception):
    """Something that must survive did not."""


@dataclass
class Job:
    """A job under the launcher, its words in files."""

    process: subprocess.Popen[bytes]
    folder: Path
    name: str

    @property
    def said(self) -> str:
        """All of its words."""
        return "".join(
            (self.folder / f"{self.name}.{end}").read_text(errors="replace").replace("\r", "\n")
            for end in ("out", "err")
        )

    @property
    def said_last(self) -> str:
        """The end of its words: enough to see what it was at."""
        return self.said[-2000:]

    seen: set[int] = field(default_factory=set)  # processes of its ranks

    def ranks(self) -> list[int]:
        """The processes of its ranks that live: descendants of the launcher that run mpitp."""
        parents, words = {}, {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):
                status = (entry / "stat").read_text()
                parents[int(entry.name)] = int(status.rpartition(")")[2].split()[1])
                words[int(entry.name)] = (entry / "cmdline").read_bytes().split(b"\0")
        family = {self.process.pid}
        while more := {pid for pid, parent in parents.items() if parent in family} - family:
            family |= more
        found = sorted(pid for pid in family if words.get(pid, [])[1:5] == [b"-P", b"-m", b"mpitp", b"train"])
        self.seen.update(found)
        return found

    def wait(self, seconds: float) -> int:
        """Its exit code, when its ranks are gone too; Lost when they don't end in time."""
        end = time.monotonic() + seconds
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.end()
            raise Lost(f"the job did not end in {seconds:.0f} s; it said last:\n{self.said_last}") from None
        while any(_lives(pid) for pid in self.seen):
            if time.monotonic() > end:
                self.end()
                raise Lost(
                    f"ranks outlived their launcher when {seconds:.0f} s were up; it said last:\n{self.said_last}"
                )
            time.sleep(0.01)
        return code

    def end(self) -> None:
        """End it and its ranks, whatever they do."""
        for pid in {*self.ranks(), *self.seen, self.process.pid}:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@dataclass
class Torture:
    """Rounds on one run, and single trials beside it."""

    folder: Path
    dice: random.Random
    rounds: int = 0
    survived: int = 0
    runs: int = 0
    skipped: list[str] = field(default_factory=list)
    unbroken: list[Any] = field(default_factory=list)

    def prepare(self) -> None:
        """The data, and the undisturbed run."""
        (self.folder / "text").write_text(TEXT)
        words = [
            "data",
            "prepare",
            str(self.folder / "text"),
            "--tokenizer",
            "bytes",
            "--out",
            str(self.folder / "data"),
        ]
        mpitp(*words, "--valid-fraction", "0.1")
        job = self.start("unbroken", 1, "--set", "checkpoint.every=0")
        if job.wait(TRIAL_SECONDS):
            raise Lost(f"the undisturbed run failed:\n{job.said}")
        self.unbroken = losses(self.folder / "unbroken")
        assert len(self.unbroken) == STEPS

    def start(self, run: str, ranks: int, *words: str, steps: int = STEPS) -> Job:
        """Start the run in the directory `run`."""
        run_dir = self.folder / run
        path = self.folder / f"{run_dir.name}.toml"
        path.write_text(RUN_FILE.format(folder=self.folder, run=run_dir, steps=steps))
        command = [sys.executable, "-m", "mpitp", "launch", "-n", str(ranks), "--", "train", str(path), *words]
        with (
            open(self.folder / f"{run_dir.name}.out", "wb") as out,
            open(self.folder / f"{run_dir.name}.err", "wb") as err,
        ):
            process = subprocess.Popen(command, stdout=out, stderr=err, env=ENVIRONMENT, start_new_session=True)
        return Job(process, self.folder, run_dir.name)

    def round(self) -> None:
        """Resume in some layout, kill one of its ranks at some moment, and look at what is left."""
        run = self.folder / "run"
        newest = newest_checkpoint(run)
        ranks, layout = self.dice.choice(LAYOUTS)
        words = ["--resume", "auto", "--set", f"checkpoint.background={str(self.dice.random() < 0.4).lower()}"]
        words += [word for key, value in layout.items() for word in ("--set", f"{key}={value}")]
        job = self.start("run", ranks, *words)
        moment = self.dice.choice(["start", "step", "step", "save", "save", "save"])
        killed = self._kill_at(moment, job, run)
        code = job.wait(MOST_SECONDS if killed else TRIAL_SECONDS)
        said = job.said
        resumed = re.search(r"resumed from \S+ after step (\d+)", said)
        if resumed and int(resumed[1]) != newest:
            raise Lost(f"step {newest} was saved, but the run went on from step {resumed[1]}:\n{said}")
        if newest and not resumed and (not killed or moment != "start"):
            raise Lost(f"the run did not resume from step {newest} (exit code {code}):\n{said}")
        if code == 0:
            self._finished(run)
        elif not killed:
            raise Lost(f"the run ended by itself with code {code}:\n{said}")
        self._check_log(run)
        told = " ".join(f"{key}={value}" for key, value in layout.items()) or "one rank"
        print(f"round {self.rounds + 1}: {told}, {moment}, steps {newest} to {newest_checkpoint(run)}", flush=True)

    def _kill_at(self, moment: str, job: Job, run: Path) -> bool:
        """Kill a random rank; False when the run had ended before."""
        log = run / "metrics.jsonl"
        if moment == "start":
            time.sleep(self.dice.uniform(0.1, 1.5))
        else:
            size, end = log.stat().st_size if log.exists() else 0, time.monotonic() + TRIAL_SECONDS
            while job.process.poll() is None and time.monotonic() < end:
                if log.exists() and log.stat().st_size > size:  # resumed, and taken a step
                    break
                size = min(size, log.stat().st_size) if log.exists() else 0
                time.sleep(0.005)
            time.sleep(self.dice.uniform(0.0, 1.0))
        if moment == "save":
            end = time.monotonic() + 5
            while not list(run.glob("checkpoints/.step-*.partial")) and time.monotonic() < end:
                if job.process.poll() is not None:
                    break
            time.sleep(self.dice.expovariate(1 / 0.02))
        ranks = job.ranks()
        if job.process.poll() is not None or not ranks:
            if job.process.poll() is None:  # the launcher hasn't come so far
                job.end()
                return True
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.dice.choice(ranks), signal.SIGKILL)
        return True

    def _check_log(self, run: Path) -> None:
        found = losses(run)
        if found != self.unbroken[: len(found)]:
            differing = next(line for line, want in zip(found, self.unbroken, strict=False) if line != want)
            raise Lost(f"the loss log differs from that of the undisturbed run: {differing}")

    def _finished(self, run: Path) -> None:
        """A run that has reached its end: it must be the undisturbed one, model and all. The next begins anew."""
        if losses(run) != self.unbroken:
            raise Lost("the loss log of the finished run isn't that of the undisturbed one")
        model = "model/model.safetensors"
        if (run / model).read_bytes() != (self.folder / "unbroken" / model).read_bytes():
            raise Lost("the final model isn't that of the undisturbed run")
        self.runs += 1
        shutil.rmtree(run)

    def finish(self) -> None:
        """Let the tortured run come to its end."""
        run = self.folder / "run"
        if run.exists():
            job = self.start("run", 2, "--resume", "auto")
            if job.wait(TRIAL_SECONDS):
                raise Lost(f"the run could not be finished:\n{job.said}")
            self._finished(run)

    # Single trials

    def full_disk(self) -> None:
        """A save that meets a full disk costs nothing but itself."""
        with self._small_disk() as disk:
            if not disk:
                return
            run = f"{disk.name}/run"
            self._ends(self.start(run, 2, steps=3), 0)
            self._fill(disk)
            job = self.start(run, 2, "--resume", "auto", steps=6)
            self._ends(job, 4, "No space left on device")
            (disk / "filler").unlink()
            if newest_checkpoint(self.folder / run) < 3:
                raise Lost(f"the checkpoint from before the disk was full is gone:\n{job.said}")
            self._ends(self.start(run, 3, "--resume", "auto", steps=6), 0)
            if len(losses(self.folder / run)) != 6:
                raise Lost("the run on the small disk isn't whole")

    def read_only_disk(self) -> None:
        """A run directory that can't be written is one message."""
        with self._small_disk() as disk:
            if disk:
                subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
                self._ends(self.start(f"{disk.name}/run", 2), 4, "Read-only file system")
        (self.folder / "file").write_text("")
        self._ends(self.start("file/run", 2), 4, "Not a directory")

    def second_job(self) -> None:
        """A second job on the directory is refused, and the first doesn't notice."""
        first = self.start("shared", 2)
        try:
            end = time.monotonic() + TRIAL_SECONDS
            while not newest_checkpoint(self.folder / "shared") and time.monotonic() < end:
                time.sleep(0.02)
            for pid in first.ranks():
                os.kill(pid, signal.SIGSTOP)  # so that it doesn't come to its end meanwhile
            (self.folder / "second").symlink_to(self.folder / "shared")
            self._ends(self.start("second", 2, "--resume", "auto"), 4, "in use by another job (process")
            for pid in first.ranks():
                os.kill(pid, signal.SIGCONT)
            self._ends(first, 0)
        finally:
            first.end()
        if losses(self.folder / "shared") != self.unbroken:
            raise Lost("the run was disturbed by the second job")

    def truncated_file(self) -> None:
        """A damaged newest checkpoint is skipped, and the one before used."""
        run = self.folder / "truncated"
        self._ends(self.start("truncated", 2, steps=9), 0)
        files = [path for path in (run / "checkpoints/step-00000009").rglob("*") if path.is_file()]
        file = self.dice.choice(sorted(files))
        os.truncate(file, self.dice.randrange(file.stat().st_size))
        self._ends(self.start("truncated", 3, "--resume", "auto"), 0, "is skipped: ", "after step 8")
        # the learning rate of the first nine steps went to its end; what counts is that all are there
        if [step for step, *_ in losses(run)] != list(range(1, STEPS + 1)):
            raise Lost("the run isn't whole after a damaged checkpoint")

    def stopped_rank(self) -> None:
        """A rank that is stopped is named by the watchdog, which then ends the job."""
        job = self.start("stopped", 3, "--set", "train.watchdog=2s", steps=100_000)
        try:
            end = time.monotonic() + TRIAL_SECONDS
            while not newest_checkpoint(self.folder / "stopped") and time.monotonic() < end:
                time.sleep(0.02)
            victim = self.dice.choice(job.ranks())
            os.kill(victim, signal.SIGSTOP)
            self._ends(job, 6, "watchdog: a collective has not completed for 2 s", f"(process {victim}), silent for")
        finally:
            job.end()

    def _ends(self, job: Job, code: int, *words: str) -> None:
        found = job.wait(TRIAL_SECONDS)
        if found != code or any(word not in job.said for word in words):
            raise Lost(f"expected code {code} and {words}, got {found}:\n{job.said}")

    @contextlib.contextmanager
    def _small_disk(self) -> Iterator[Path | None]:
        disk = self.folder / "disk"
        disk.mkdir(exist_ok=True)
        words = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
        if os.geteuid() or subprocess.run(words, capture_output=True, check=False).returncode:
            self.skipped.append("a small disk of its own (a tmpfs) can't be mounted here: needs root")
            yield None
            return
        try:
            yield disk
        finally:
            subprocess.run(["umount", "-l", str(disk)], check=False)

    def _fill(self, disk: Path) -> None:
        """Leave a few pages: enough for the small files of a checkpoint, not for its tensors."""
        usage = os.statvfs(disk)
        with open(disk / "filler", "wb") as file:
            file.write(b"x" * (usage.f_bavail * usage.f_frsize - (64 << 10)))


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def losses(run: Path) -> list[Any]:
    """The whole lines of the loss log, times left out."""
    path = run / "metrics.jsonl"
    lines = path.read_text(errors="replace").split("\n")[:-1] if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return [(r["step"], r["loss"], r["grad_norm"], r["lr"], r["tokens"], r.get("valid_loss")) for r in records]


def newest_checkpoint(run: Path) -> int:
    """The step of the newest published checkpoint; 0 without one."""
    return max((int(path.name[5:]) for path in run.glob("checkpoints/step-*")), default=0)


def mpitp(*words: str) -> None:
    """Run a verb on one rank."""
    subprocess.run([sys.executable, "-m", "mpitp", *words], check=True, env=ENVIRONMENT, capture_output=True)


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}


def main() -> int:
    """All rounds and trials; 1 when anything was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rounds", type=int, nargs="?", default=100)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the dice (printed)")
    parser.add_argument("--keep", action="store_true", help="keep the runs' folder")
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="mpitp-torture-"))
    torture = Torture(folder, random.Random(args.seed))
    try:
        torture.prepare()
        trials = [torture.full_disk, torture.read_only_disk, torture.second_job, torture.truncated_file]
        for trial in [*[torture.round] * args.rounds, torture.finish, *trials, torture.stopped_rank]:
            try:
                trial()
                torture.survived += 1
            except Lost as error:
                print(f"LOST in {trial.__name__}: {error}", flush=True)
                shutil.rmtree(folder / "run", ignore_errors=True)
            torture.rounds += 1
            if trial != torture.round:
                print(f"{trial.__name__.replace('_', ' ')}: {trial.__doc__}", flush=True)
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)
    for reason in sorted(set(torture.skipped)):
        print(f"SKIPPED: {reason}")
    lost = torture.rounds - torture.survived
    print(f"{torture.runs} runs came to their end, each with the losses and the model of the undisturbed one")
    print(f"rounds {torture.rounds}, survived {torture.survived}, lost {lost}")
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
