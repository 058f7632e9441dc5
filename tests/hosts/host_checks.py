"""The program on several hosts, which share nothing but a network and a disk. Run by tests/hosts/run only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.hosts import (
    BIN,
    HERE,
    free_links,
    limit_links,
    make_hosts,
    process_of,
    run_job,
    sent_bytes,
    start_job,
)

MPITP = ["-m", "mpitp"]
DEAD_RANK_SECONDS = 10
LARGE_SUMS = ["train.invariant=false", "model.hidden_size=144", "train.micro_batch_size=16"]  # 0.6 MB each
RUN_FILE = """
[model]
model_type = "llama"
hidden_size = 48
num_hidden_layers = 2
num_attention_heads = 9
num_key_value_heads = 3
head_dim = 8
intermediate_size = 50
max_position_embeddings = 64
[data]
train = "data"
seq_len = 64
[train]
steps = 4
micro_batch_size = 4
invariant = true
run_dir = "runs/unnamed"
[optim]
lr = 1e-3
[checkpoint]
every = 3
"""

Losses = list[tuple[int, float, float]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The hosts, and a folder that all of them see: a text, prepared, and a run file."""
    folder = tmp_path_factory.mktemp("hosts")
    make_hosts(3, folder)
    (folder / "run.toml").write_text(RUN_FILE)
    (folder / "text.txt").write_text("".join(f"{i} squared is {i * i}. " for i in range(2000)))
    command = [BIN / "mpitp", "data", "prepare", "text.txt", "--tokenizer", "bytes", "--out", "data"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def trained(folder: Path) -> Losses:
    """The losses of a run on one host."""
    return train(folder, (2,), "runs/one-host")


def train(folder: Path, ranks: tuple[int, ...], run: str, *more: str) -> Losses:
    run_job(ranks, [*MPITP, "train", "run.toml", "--set", f"train.run_dir={run}", *more], folder)
    records = [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]
    return [(record["step"], record["loss"], record["grad_norm"]) for record in records]


def wait_for(what: str, happened: Callable[[], Any], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        time.sleep(0.1)


def test_ranks_know_their_hosts(folder: Path) -> None:
    places = json.loads(run_job((2, 2, 1), [str(HERE / "say_place.py")], folder))
    assert [place["rank"] for place in places] == [0, 1, 2, 3, 4]
    assert [place["host"] for place in places] == ["h1", "h1", "h2", "h2", "h3"]
    assert [place["found"] for place in places] == [[0, 2], [1, 2], [0, 2], [1, 2], [0, 1]]
    assert [place["claimed"] for place in places] == [place["found"] for place in places]


def test_groups_of_a_mesh_lie_on_their_hosts(folder: Path) -> None:
    """Two hosts, dp 2 x tp 2: tp inside a host through its window, dp between hosts, both started in the background."""
    for place in json.loads(run_job((2, 2), [str(HERE / "say_place.py")], folder)):
        assert place["groups"] == [["NodeGroup", 2, True], ["MpiGroup", 1, True], ["NodeGroup", 2, False]]


@pytest.mark.parametrize(
    ("ranks", "told"), [((2, 2), "4 on 2 host(s) (h1: 2, h2: 2)"), ((1, 1, 1), "3 on 3 host(s) (h1: 1, h2: 1, h3: 1)")]
)
def test_doctor(folder: Path, ranks: tuple[int, ...], told: str) -> None:
    report = run_job(ranks, [*MPITP, "doctor"], folder)
    assert told in report and "all is well" in report


@pytest.mark.parametrize("ranks", [(2, 2), (1, 1, 1), (2, 1)])
def test_training_has_the_same_bits_as_on_one_host(folder: Path, trained: Losses, ranks: tuple[int, ...]) -> None:
    run = "runs/hosts-" + "-".join(map(str, ranks))
    before = sent_bytes("h2")
    assert train(folder, ranks, run) == trained
    assert sent_bytes("h2") - before > 500_000  # through the network
    assert sorted(path.name for path in (folder / run / "checkpoints").iterdir()) == ["step-00000003", "step-00000004"]


def test_training_through_shared_memory_and_network_together(folder: Path, trained: Losses) -> None:
    losses = train(folder, (2, 2), "runs/plain", "--set", "train.invariant=false")
    for (step, loss, norm), (same_step, expected, expected_norm) in zip(losses, trained, strict=True):
        assert (step, loss, norm) == (
            same_step,
            pytest.approx(expected, rel=1e-5),
            pytest.approx(expected_norm, rel=1e-3),
        )


@pytest.mark.parametrize("ranks", [(1, 1), (2, 2)])
def test_training_with_sums_that_move_on_behind_products(folder: Path, ranks: tuple[int, ...]) -> None:
    more = [word for setting in LARGE_SUMS for word in ("--set", setting)]
    expected = train(folder, (sum(ranks),), f"runs/large-{sum(ranks)}", *more)
    losses = train(folder, ranks, f"runs/large-hosts-{sum(ranks)}", *more)
    assert [step for step, _, _ in losses] == [step for step, _, _ in expected]
    for (_, loss, norm), (_, one_loss, one_norm) in zip(losses, expected, strict=True):
        assert (loss, norm) == (pytest.approx(one_loss, rel=1e-5), pytest.approx(one_norm, rel=1e-3))


def test_replicas_on_two_hosts(folder: Path) -> None:
    """Tensor parallelism inside a host, a replica on each; with ZeRO-1 the bits of one host, with ZeRO-3 nearly."""
    micro = ("--set", "train.micro_batch_size=1", "--set", "train.global_batch_size=5")
    hosts = (*micro, "--set", "mesh.dp=2")
    expected = train(folder, (1,), "runs/replicas-one-rank", *micro)
    before = sent_bytes("h2")
    assert train(folder, (2, 2), "runs/replicas-1", *hosts, "--set", "optim.zero=1") == expected
    assert sent_bytes("h2") - before > 500_000
    plain = train(folder, (2, 2), "runs/replicas-3", *hosts, "--set", "optim.zero=3", "--set", "train.invariant=false")
    for (_, loss, norm), (_, one_loss, one_norm) in zip(plain, expected, strict=True):
        assert (loss, norm) == (pytest.approx(one_loss, rel=1e-5), pytest.approx(one_norm, rel=1e-3))


def test_a_pipeline_over_two_hosts(folder: Path) -> None:
    """A stage on each host, cut over its two ranks; messages of 0.1 MB go from host to host. The bits of one rank."""
    micro = (
        "--set",
        "train.micro_batch_size=1",
        "--set",
        "train.global_batch_size=4",
        "--set",
        "model.hidden_size=432",
    )
    expected = train(folder, (1,), "runs/stages-one-rank", *micro)
    before = sent_bytes("h2")
    assert train(folder, (2, 2), "runs/stages", *micro, "--set", "mesh.pp=2", "--set", "mesh.schedule=zb") == expected
    assert sent_bytes("h2") - before > 4 * 4 * 2 * 64 * 432 * 4  # steps, microbatches, ranks, tokens, width, bytes


def test_replicas_of_pipelines_of_cut_stages_go_on_in_another_layout(folder: Path) -> None:
    """pp 2 x dp 2 x tp 2, a stage on each host; then dp 3 on three hosts, with ZeRO-1. The bits of one rank."""
    batch = ("train.micro_batch_size=1", "train.global_batch_size=4", "optim.schedule=constant")
    micro = [word for setting in batch for word in ("--set", setting)]
    expected = train(folder, (1,), "runs/axes-one-rank", *micro)
    before = sent_bytes("h2")
    axes = [word for axis in ("pp", "dp", "tp") for word in ("--set", f"mesh.{axis}=2")]
    assert train(folder, (4, 4), "runs/axes", *micro, *axes, "--set", "train.steps=3") == expected[:3]
    assert sent_bytes("h2") - before > 2 * 3 * 4 * 64 * 48 * 4  # both ways, steps, microbatches, tokens, width, bytes
    others = ("--set", "mesh.dp=3", "--set", "optim.zero=1", "--resume", "auto")
    assert train(folder, (1, 1, 1), "runs/axes", *micro, *others) == expected


def test_sums_are_hidden_on_a_slow_link(folder: Path) -> None:
    # a sum of 2 MiB takes 17 ms, the products behind which dx and y run 5 to 20 ms
    sizes = "--layers 1 --hidden 512 --heads 8 --vocab 512 --batch 4 --seq 256 --steps 3"
    limit_links(2, "1gbit")
    try:
        told = run_job((1, 1), [str(HERE / "bound.py"), "bench", "train", "--json", *sizes.split()], folder)
    finally:
        free_links(2)
    found = json.loads(told)
    overlapped, counted = found["overlap"]["overlapped"], found["communication"]
    assert overlapped["calls"] >= 5 and overlapped["hidden"] > 0.1
    assert (counted["calls"], counted["bytes_a_rank"]) == (counted["expected_calls"], counted["expected_bytes_a_rank"])
    print(f"{100 * overlapped['hidden']:.0f} % hidden, {found['sums_at_once']}")


def test_resume_on_other_hosts(folder: Path, trained: Losses) -> None:
    train(folder, (2, 2), "runs/moved", "--set", "train.steps=3", "--set", "optim.schedule=constant")
    whole = train(folder, (2,), "runs/whole", "--set", "optim.schedule=constant")
    again = ("--resume", "auto", "--set", "optim.schedule=constant")
    assert train(folder, (1, 1, 1), "runs/moved", *again) == whole


def test_generated_text_is_that_of_one_host(folder: Path, trained: Losses) -> None:
    words = [*MPITP, "generate", "--model", "runs/one-host/model", "--prompt", "7 squared", "--max-new-tokens", "12"]
    texts = {run_job(ranks, words, folder) for ranks in [(1,), (2, 2), (1, 1, 1)]}
    assert len(texts) == 1 and texts.pop().startswith("7 squared")


@pytest.mark.parametrize("settings", [[], LARGE_SUMS], ids=["invariant", "large sums"])
def test_killed_rank_on_the_second_host_ends_the_job(folder: Path, settings: list[str]) -> None:
    run = f"runs/killed-{len(settings)}"
    words = [*MPITP, "train", "run.toml"]
    for setting in (f"train.run_dir={run}", "train.steps=100000", *settings):
        words += ["--set", setting]
    job = start_job((2, 2), words, folder)
    try:
        wait_for("two steps", lambda: (folder / run / "metrics.jsonl").is_file() and _lines(folder / run) >= 2)
        statuses = [json.loads(path.read_text()) for path in (folder / run).glob(".watchdog*/rank-*.json")]
        assert {status["rank"]: status["host"] for status in statuses} == {0: "h1", 1: "h1", 2: "h2", 3: "h2"}
        (number,) = [status["pid"] for status in statuses if status["rank"] == 3]  # as its own host counts processes
        os.kill(process_of(3, run), signal.SIGKILL)
        began = time.monotonic()
        out, err = job.communicate(timeout=30)
        seconds = time.monotonic() - began
    finally:
        job.kill()
        job.wait()
    assert job.returncode not in (0, 75)
    # mpiexec is quicker than the ranks that live on; it names the host, and the process as the status files do
    assert "rank 3" in err or f"PID {number} RUNNING AT 10.77.0.2" in out + err, out + err
    assert seconds < DEAD_RANK_SECONDS


def _lines(run: Path) -> int:
    return len((run / "metrics.jsonl").read_text().splitlines())
