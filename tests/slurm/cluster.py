"""A real SLURM on one machine: munge, the controller, and two virtual nodes, all under one temporary folder.

    python -m tests.slurm.cluster COMMAND ...       runs a command with the cluster up (a shell, to look around)

Needs root and Debian's packages slurmctld, slurmd, slurm-client and munge. Nothing is read from or written to /etc, the
ports are free ones, and every process that was started is ended, so a SLURM of the machine's own is not touched.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import stat
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

HERE = Path(__file__).resolve().parent
NODES = ("n1", "n2")
# What a killed job leaves in /dev/shm goes with the node.
NODE_OF_ITS_OWN = "hostname {node} && mount -t tmpfs -o mode=1777 shm /dev/shm && exec slurmd -D -N {node}"
DAEMONS = {"PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}


def wait_for(what: str, happened: Callable[[], object], seconds: float) -> None:
    """Look again and again until it has happened. Raises TimeoutError."""
    end = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.2)


@dataclass(frozen=True)
class JobState:
    """What the controller says about a job. `code`: the exit code of its script, `restarts`: how often requeued."""

    state: str
    code: int
    signal: int
    restarts: int

    @property
    def is_over(self) -> bool:
        return self.state in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


class Cluster:
    """The cluster, while a `with` block lasts."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mpitp-slurm-", dir="/tmp"))
        self.environment = {**os.environ, **DAEMONS, "SLURM_CONF": str(self.folder / "slurm.conf")}
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Cluster:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a time limit around us leaves nothing behind
        try:
            self._start()
        except BaseException:
            self.show_logs()
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is not None:
            self.show_logs()
        self.stop()

    def run(self, *command: str, check: bool = True, **variables: str) -> str:
        """The output of one of SLURM's commands (stderr too when it fails)."""
        environment = {**self.environment, **variables}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        if check and done.returncode:
            raise RuntimeError(f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout if check else done.stdout + done.stderr

    def submit(self, *words: str, folder: Path, **variables: str) -> str:
        """`sbatch` these words; the job's number."""
        out = self.run("sbatch", "--parsable", f"--chdir={folder}", *words, **variables)
        return out.strip().split(";")[0]

    def job(self, number: str) -> JobState:
        """How a job is."""
        words = self.run("scontrol", "show", "job", "--oneliner", number).split()
        facts = dict(word.split("=", 1) for word in words if "=" in word)
        code, signal_number = facts["ExitCode"].split(":")
        return JobState(facts["JobState"], int(code), int(signal_number), int(facts["Restarts"]))

    def wait(self, number: str, seconds: float = 90) -> JobState:
        """Wait until the job is over."""
        wait_for(f"end of job {number}", lambda: self.job(number).is_over, seconds)
        return self.job(number)

    def show_logs(self) -> None:
        """The ends of the daemons' logs, on stderr."""
        for path in sorted(self.folder.glob("*.log")):
            print(f"----- end of {path.name}", *path.read_text().splitlines()[-15:], sep="\n", file=sys.stderr)

    def stop(self) -> None:
        """End the jobs, then every process that was started, and remove the folder."""
        with contextlib.suppress(Exception):
            if not self._processes:
                return
            self.run("scancel", "--full", "--signal=KILL", "--state=RUNNING", "--partition=main")
            self.run("scancel", "--partition=main")
            wait_for("end of all jobs", lambda: not self.run("squeue", "--noheader").strip(), 15)
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for number in left_behind(self.environment["SLURM_CONF"]):  # a step daemon that outlived its node
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        host, (port, port1, port2) = socket.gethostname().split(".")[0], free_ports(3)
        names = {"folder": str(self.folder), "host": host, "port": port, "port1": port1, "port2": port2}
        text = string.Template((HERE / "slurm.conf").read_text()).substitute(names)
        (self.folder / "slurm.conf").write_text(text)
        for number in range(4):  # GPUs for the controller's books only
            os.mknod(self.folder / f"gpu{number}", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        (self.folder / "gres.conf").write_text(f"NodeName=n[1-2] Name=gpu File={self.folder}/gpu[0-3]\n")
        (self.folder / "state").mkdir()
        self._start_munge()
        self._run_daemon("slurmctld", "-D")
        for node in NODES:
            (self.folder / f"spool.{node}").mkdir()
            self._run_daemon("unshare", "--uts", "--mount", "sh", "-c", NODE_OF_ITS_OWN.format(node=node))
        wait_for("both nodes idle", self._nodes_are_idle, 30)

    def _start_munge(self) -> None:
        folder = self.folder / "munge"
        folder.mkdir(mode=0o755)
        self.folder.chmod(0o755)
        key = folder / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        names = {"key-file": "key", "log-file": "log", "pid-file": "pid", "seed-file": "seed", "socket": "socket"}
        self._run_daemon("munged", "--foreground", *(f"--{option}={folder / name}" for option, name in names.items()))
        wait_for("munge's socket", (folder / "socket").exists, 20)

    def _nodes_are_idle(self) -> bool:
        told = self.run("sinfo", "--noheader", "--Node", "--format=%N %T", check=False)
        return told.split("\n")[:2] == [f"{node} idle" for node in NODES]

    def _run_daemon(self, *command: str) -> None:
        log = open(self.folder / f"{command[0]}-{len(self._processes)}.out", "wb")  # noqa: SIM115 (the daemon's)
        with log:
            self._processes.append(
                subprocess.Popen(
                    command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder
                )
            )


def left_behind(conf: str) -> Iterator[int]:
    """Processes that have our SLURM_CONF in their environment (ourselves have not)."""
    wanted = f"SLURM_CONF={conf}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


def free_ports(count: int) -> list[int]:
    """TCP ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def main(command: list[str]) -> int:
    """Run a command with the cluster up; its exit code."""
    with Cluster() as cluster:
        return subprocess.run(command or ["bash"], env=cluster.environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
