"""The job files of scripts/slurm, submitted to a real SLURM of two nodes. Run by tests/slurm/run only."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.served import make_directory
from tests.serve.test_server import ask
from tests.slurm.cluster import Cluster, wait_for

ROOT = Path(__file__).resolve().parents[2]
JOBS = ROOT / "scripts" / "slurm"
BIN = Path(sys.executable).parent
SMALL = ("--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1")
DEAD_RANK_SECONDS = 10
RUN_FILE = """
[model]
model_type = "llama"
hidden_size = 36
num_hidden_layers = 2
num_attention_heads = 9
num_key_value_heads = 3
intermediate_size = 50
max_position_embeddings = 32
[data]
train = "data"
seq_len = 32
[train]
steps = 30
micro_batch_size = 1
global_batch_size = 12
run_dir = "runs/unnamed"
[optim]
lr = 1e-3
[checkpoint]
every = 20
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where jobs are submitted from: a text, prepared, and a run file."""
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "run.toml").write_text(RUN_FILE)
    (folder / "text.txt").write_text("".join(f"{i} squared is {i * i}. " for i in range(2000)))
    command = [BIN / "mpitp", "data", "prepare", "text.txt", "--tokenizer", "bytes", "--out", "data"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        for name in [name for name in cluster.environment if name.startswith(("OPENBLAS", "OMP_", "MPITP_"))]:
            del cluster.environment[name]
        cluster.environment["PATH"] = f"{BIN}:{cluster.environment['PATH']}"
        yield cluster


def losses(run: Path) -> list[tuple[int, float, float]]:
    """Step, loss and gradient norm of each line of a run's log."""
    try:
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    except (FileNotFoundError, ValueError):  # not begun, or in the middle of a line
        return []
    return [(record["step"], record["loss"], record["grad_norm"]) for record in records]


def output(folder: Path, name: str) -> str:
    return (folder / f"{name}.out").read_text().replace("\r", "\n")


def start(cluster: Cluster, folder: Path, file: str, run: str, *more: str, **variables: str) -> str:
    """Submit a job file for the run directory `run`; the job's number."""
    return cluster.submit(
        *SMALL, str(JOBS / file), "run.toml", "--set", f"train.run_dir={run}", *more, folder=folder, **variables
    )


def wait_for_step(folder: Path, run: str, step: int) -> None:
    wait_for(f"step {step} of {run}", lambda: len(losses(folder / run)) >= step, 60)


@pytest.fixture(scope="module")
def unbroken(cluster: Cluster, folder: Path) -> list[tuple[int, float, float]]:
    """The loss log of a run that nothing disturbed."""
    number = start(cluster, folder, "cpu_multinode.sbatch", "runs/whole")
    job = cluster.wait(number)
    text = output(folder, f"mpitp-train-{number}")
    assert (job.state, job.code) == ("COMPLETED", 0), text
    launch = "mpitp launch: srun --kill-on-bad-exit=1 --mpi=pmi2 --cpus-per-task=1 -n 4 "
    assert text.startswith(launch)
    log = losses(folder / "runs/whole")
    assert [step for step, _, _ in log] == list(range(1, 31))
    return log


def test_job_on_two_nodes(unbroken: list[Any], folder: Path) -> None:
    assert unbroken[-1][1] < unbroken[0][1]
    assert (folder / "runs/whole/model/model.safetensors").is_file()


def test_preempted_job_is_requeued_and_its_losses_do_not_show_it(
    cluster: Cluster, folder: Path, unbroken: list[Any]
) -> None:
    number = start(cluster, folder, "requeue_on_preemption.sbatch", "runs/cut")
    wait_for_step(folder, "runs/cut", 5)
    cluster.run("scancel", "--batch", "--signal=USR1", number)
    wait_for("requeue", lambda: cluster.job(number).restarts == 1, 30)
    assert 5 <= len(losses(folder / "runs/cut")) < 30
    job = cluster.wait(number)
    text = output(folder, f"mpitp-requeue-{number}")
    assert (job.state, job.code, job.restarts) == ("COMPLETED", 0, 1), text
    assert "SIGUSR1 received" in text and "resumed from runs/cut/checkpoints/step-" in text
    assert losses(folder / "runs/cut") == unbroken


def test_cancelled_job_is_saved_stays_cancelled_and_goes_on_with_other_ranks(
    cluster: Cluster, folder: Path, unbroken: list[Any]
) -> None:
    number = start(cluster, folder, "requeue_on_preemption.sbatch", "runs/moved")
    wait_for_step(folder, "runs/moved", 3)
    cluster.run("scancel", number)
    job = cluster.wait(number)
    assert (job.state, job.restarts) == ("CANCELLED", 0), output(folder, f"mpitp-requeue-{number}")
    wait_for("nothing in the queue", lambda: not cluster.run("squeue", "--noheader").strip(), 30)
    done = len(losses(folder / "runs/moved"))
    assert 3 <= done < 20  # before the first checkpoint that was due
    words = ["--nodes=1", "--ntasks-per-node=3", "--cpus-per-task=1", str(JOBS / "cpu_multinode.sbatch"), "run.toml"]
    number = cluster.submit(*words, "--set", "train.run_dir=runs/moved", folder=folder)
    job = cluster.wait(number)
    text = output(folder, f"mpitp-train-{number}")
    assert (job.state, job.code) == ("COMPLETED", 0), text
    assert f"after step {done}" in text
    for (step, loss, _), (same_step, expected, _) in zip(losses(folder / "runs/moved"), unbroken, strict=True):
        assert (step, loss) == (same_step, pytest.approx(expected, rel=1e-4))


def test_stages_replicas_and_shards_on_two_nodes_go_on_in_another_layout(cluster: Cluster, folder: Path) -> None:
    """pp 2 x dp 2 x tp 2 with a stage on each node, then dp 3 on one node: the bits of one rank."""
    keys = ("train.steps=5", "train.invariant=true", "train.global_batch_size=4", "optim.schedule=constant")
    same = [word for key in keys for word in ("--set", key)]
    command = [BIN / "mpitp", "train", "run.toml", *same, "--set", "train.run_dir=runs/one"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, env=cluster.environment)

    def run(tasks: tuple[str, ...], *more: str) -> str:
        words = (*tasks, "--cpus-per-task=1", str(JOBS / "cpu_multinode.sbatch"), "run.toml", *same)
        number = cluster.submit(*words, "--set", "train.run_dir=runs/axes", *more, folder=folder)
        job, text = cluster.wait(number), output(folder, f"mpitp-train-{number}")
        assert (job.state, job.code) == ("COMPLETED", 0), text
        return text

    axes = [word for axis in ("pp", "dp", "tp") for word in ("--set", f"mesh.{axis}=2")]
    run(("--nodes=2", "--ntasks-per-node=4"), *axes, "--set", "train.steps=3")
    assert losses(folder / "runs/axes") == losses(folder / "runs/one")[:3]
    assert "after step 3" in run(("--nodes=1", "--ntasks-per-node=3"), "--set", "mesh.dp=3", "--set", "optim.zero=1")
    assert losses(folder / "runs/axes") == losses(folder / "runs/one")


def test_array_sweep_and_exit_codes(cluster: Cluster, folder: Path) -> None:
    (folder / "sweep.txt").write_text("optim.lr=1e-3 train.steps=2\ndata.seq_len=4096\n")
    words = ["--array=1-3", "--ntasks-per-node=2", "--cpus-per-task=1", str(JOBS / "array_sweep.sbatch"), "run.toml"]
    number = cluster.submit(*words, folder=folder, MPITP_SWEEP="sweep.txt")
    jobs = [cluster.wait(f"{number}_{place}") for place in (1, 2, 3)]
    texts = [output(folder, f"mpitp-sweep-{number}_{place}") for place in (1, 2, 3)]
    assert [job.code for job in jobs] == [0, 3, 2], "\n".join(texts)
    assert len(losses(folder / f"runs/sweep-{number}/1")) == 2
    assert texts[1].count("ConfigError: data.seq_len=4096 exceeds") == 1 and "Traceback" not in texts[1]
    assert "sweep.txt has no line 3" in texts[2]


def test_gpu_job_on_nodes_without_working_gpus(cluster: Cluster, folder: Path) -> None:
    number = start(cluster, folder, "gpu_multinode.sbatch", "runs/gpu")
    job = cluster.wait(number)
    text = output(folder, f"mpitp-gpu-{number}")
    assert (job.state, job.code) == ("FAILED", 6), text
    assert "Error: " in text and "Traceback" not in text


def test_interactive_shell_and_launchers(cluster: Cluster, folder: Path) -> None:
    step = "srun --mpi=none -N1 -n1 mpitp launch -n 2"
    inside = (
        "mpitp launch --dry-run -- doctor; mpitp launch -- doctor; MPITP_LAUNCHER=mpirun mpitp launch -- doctor; "
        f"{step} --dry-run -- doctor; {step} -- doctor"
    )
    words = [str(JOBS / "interactive.sh"), *SMALL, "bash", "-c", inside]
    told = subprocess.run(words, env=cluster.environment, cwd=folder, capture_output=True, text=True, timeout=90)
    text = told.stdout + told.stderr
    python = f"{sys.executable} -P -m mpitp doctor\n"
    assert told.stderr.count(f"srun --kill-on-bad-exit=1 --mpi=pmi2 --cpus-per-task=1 -n 4 {python}") == 2, text
    assert f"mpitp launch: {BIN}/mpirun -n 4 {python}" in told.stderr
    assert told.stderr.count(f"--mpi=pmi2 --cpus-per-task=1 --overlap -n 2 {python}") == 2, text
    assert told.stdout.count("4 on 2 host(s) (n1: 2, n2: 2)") == 2, text
    assert len(re.findall("ranks +2 on ", told.stdout)) == 1, text


def test_killed_rank_ends_the_job_everywhere(cluster: Cluster, folder: Path) -> None:
    number = start(cluster, folder, "cpu_multinode.sbatch", "runs/killed", "--set", "train.steps=10000")
    wait_for_step(folder, "runs/killed", 2)
    (path,) = (folder / "runs/killed").glob(".watchdog*/rank-3.json")
    status = json.loads(path.read_text())
    assert status["host"] == "n2"
    os.kill(status["pid"], signal.SIGKILL)
    killed = time.monotonic()
    job = cluster.wait(number, 30)
    text = output(folder, f"mpitp-train-{number}")
    assert job.state == "FAILED" and job.code not in (0, 75), text
    assert "n2: task 3: Killed" in text and "rank 3" in text, text
    assert time.monotonic() - killed < DEAD_RANK_SECONDS


def test_a_server_answers_and_drains_when_its_time_is_up(cluster: Cluster, folder: Path) -> None:
    model = make_directory(folder / "served")
    size = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1")
    words = (*size, str(JOBS / "serve.sbatch"), "--model", str(model), "--quiet")
    number = cluster.submit(*words, folder=folder)
    name = f"mpitp-serve-{number}"
    log = folder / f"{name}.out"
    wait_for("a serving job", lambda: log.exists() and "serving served at" in log.read_text(), 80)
    port = 20000 + int(number) % 20000
    told = re.search(rf"ssh -N -L 8000:(\S+):{port} ", output(folder, name))
    assert told and "2 ranks" in output(folder, name)
    key = folder / f"serve-{number}.key"
    assert key.stat().st_mode & 0o077 == 0
    url, body = f"http://127.0.0.1:{port}/v1/completions", {"prompt": "a", "max_tokens": 5, "ignore_eos": True}
    assert ask(url, body)[0] == 401
    status, answer = ask(url, body, authorization=f"Bearer {key.read_text().strip()}")
    assert status == 200 and answer["usage"]["completion_tokens"] == 5
    subprocess.run(["scancel", "--signal=TERM", number], env=cluster.environment, check=True)  # as --signal does
    job = cluster.wait(number, 30)
    assert (job.state, job.code) == ("COMPLETED", 0), output(folder, name)
    assert not key.exists()
