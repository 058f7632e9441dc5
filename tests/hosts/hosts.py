"""Several hosts on one machine: network namespaces joined by a bridge, with addresses and hostnames of their own.

MPI takes them for machines of their own and talks TCP between them. `tests/hosts/run` has put us into namespaces of our
own first (network, mounts, processes), so all this is gone when we are.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent
NETWORK = "10.77.0"


def make_hosts(count: int, folder: Path) -> None:
    """Hosts h1, h2, ... with addresses 10.77.0.1 and on."""
    subprocess.run(["mount", "-t", "tmpfs", "none", "/run/netns"], check=True)  # the names of namespaces, for us alone
    _ip("link set lo up")
    _ip("link add bridge type bridge")
    _ip("link set bridge up")
    for number in range(1, count + 1):
        name = f"h{number}"
        _ip(f"netns add {name}")
        _ip(f"link add to-{name} type veth peer name eth0 netns {name}")
        _ip(f"link set to-{name} master bridge up")
        for words in ("link set lo up", f"addr add {NETWORK}.{number}/24 dev eth0", "link set eth0 up"):
            _ip(f"-netns {name} {words}")
    names = "".join(f"{NETWORK}.{number} h{number}\n" for number in range(1, count + 1))
    (folder / "hosts").write_text("127.0.0.1 localhost\n" + names)
    subprocess.run(["mount", "--bind", str(folder / "hosts"), "/etc/hosts"], check=True)


def limit_links(count: int, rate: str) -> None:
    """What each of the hosts h1, h2, ... sends goes at `rate` ("1gbit"), until `free_links`."""
    for number in range(1, count + 1):
        _tc(f"qdisc add dev eth0 root tbf rate {rate} burst 128k latency 20ms", number)


def free_links(count: int) -> None:
    """As fast as they can again."""
    for number in range(1, count + 1):
        _tc("qdisc del dev eth0 root", number)


def sent_bytes(name: str) -> int:
    """What has left a host so far, and what has come to it, as its end of the bridge counts."""
    told = subprocess.run(
        ["ip", "-json", "-statistics", "link", "show", f"to-{name}"], capture_output=True, text=True, check=True
    )
    statistics = json.loads(told.stdout)[0]["stats64"]
    return statistics["rx"]["bytes"] + statistics["tx"]["bytes"]


def job_command(ranks: tuple[int, ...], words: list[str]) -> list[str]:
    """An mpiexec started on h1, with so many ranks on h1, h2, ...; `words`: what Python is to run."""
    places = ",".join(f"{NETWORK}.{number}:{count}" for number, count in enumerate(ranks, 1))
    agent = ["-launcher", "ssh", "-launcher-exec", str(HERE / "ssh_stand_in")]
    mpiexec = [str(BIN / "mpiexec"), *agent, "-hosts", places, "-n", str(sum(ranks))]
    return [str(HERE / "on_host"), "h1", *mpiexec, sys.executable, *words]


def start_job(ranks: tuple[int, ...], words: list[str], folder: Path) -> subprocess.Popen[str]:
    """Start it in `folder`; what it says is in its `stdout` and `stderr`."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        job_command(ranks, words), cwd=folder, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
    )


def run_job(ranks: tuple[int, ...], words: list[str], folder: Path) -> str:
    """Run it to its good end; its stdout."""
    job = start_job(ranks, words, folder)
    out, err = job.communicate(timeout=60)
    assert job.returncode == 0, f"exit code {job.returncode}\n{out}{err}"
    return out


def process_of(rank: int, run_dir: str) -> int:
    """The number, as seen from here, of the process that is a rank of the job on `run_dir`."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"PMI_RANK={rank}".encode() in variables and f"train.run_dir={run_dir}".encode() in words:
            return int(folder.name)
    raise LookupError(f"rank {rank} of {run_dir} doesn't run")


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)


def _tc(words: str, number: int) -> None:
    _ip(f"netns exec h{number} tc {words}")
