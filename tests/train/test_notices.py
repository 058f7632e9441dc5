"""A line where a user would wonder, none where all is as it should be; held-out text is read batch by batch."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from mpitp.comm import SerialGroup
from mpitp.data.sampler import Sampler
from mpitp.layers.site import make_site
from mpitp.models import new_model
from mpitp.train.setup import held_out_batches, open_data, run_notices
from mpitp.train.step import evaluate
from tests.train.invariant_case import CONFIGS
from tests.train.run_case import config, make_data, run


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


def notices(data: Path, run_dir: Path, **changes: Any) -> list[str]:
    settings = config(data, run_dir, **changes)
    return run_notices(settings, open_data(settings))


def test_nothing_is_said_of_a_run_in_order(tmp_path: Path, data: Path) -> None:
    assert notices(data, tmp_path / "run") == []
    assert notices(data, tmp_path / "run", optim_warmup_steps=10) == []  # reached at the last step


def test_fewer_windows_than_a_step_takes(tmp_path: Path, data: Path) -> None:
    """1945 tokens are 3 windows of 512."""
    changes: dict[str, Any] = {"data_seq_len": 512, "data_valid": None, "train_eval_every": 0}
    assert notices(data, tmp_path / "run", train_global_batch_size=6, train_steps=10, **changes) == [
        f"a step takes 6 sequences, but {data}/train has only 3 of data.seq_len=512 tokens: a step shows each about 2 "
        "times, and 10 steps are 20 epochs"
    ]
    changes |= {"train_micro_batch_size": 1}
    assert notices(data, tmp_path / "run", train_global_batch_size=3, **changes) == []
    (line,) = notices(data, tmp_path / "run", train_global_batch_size=4, train_steps=3, **changes)
    assert "about 1.33 times, and 3 steps are 4 epochs" in line


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_peak_that_is_never_reached(tmp_path: Path, data: Path, schedule: str) -> None:
    changes: dict[str, Any] = {"optim_warmup_steps": 40, "optim_schedule": schedule}
    assert notices(data, tmp_path / "run", **changes) == [
        "optim.warmup_steps=40 is more than train.steps=10: the learning rate ends at 0.0025, and optim.lr=0.01 is "
        "never reached"
    ]


def test_replicas_without_work(tmp_path: Path, data: Path) -> None:
    (line,) = notices(data, tmp_path / "run", mesh_dp=3)  # 4 sequences, 2 in a microbatch
    assert "2 microbatches for mesh.dp=3 replicas" in line and "a smaller train.micro_batch_size" in line
    assert notices(data, tmp_path / "run", mesh_dp=2) == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_rank_says_it_once(tmp_path: Path, data: Path, ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    run(ranks, config(data, tmp_path / "run", optim_warmup_steps=40, train_steps=1, checkpoint_every=0))
    assert capsys.readouterr().err.count("mpitp: optim.warmup_steps=40 is more than train.steps=1") == 1


def test_held_out_text_is_read_when_it_is_due(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all batches one at a time is there, and the loss is that of all of them."""
    settings = config(data, tmp_path / "run", data_valid=str(data / "train"), data_valid_sequences=0)
    sampler = open_data(settings).valid
    assert sampler is not None and sampler.num_windows > 200
    asked: list[int] = []
    real = Sampler.batch

    def batch(self: Sampler, samples: Any) -> Any:
        asked.extend(samples)
        return real(self, samples)

    monkeypatch.setattr(Sampler, "batch", batch)
    batches = held_out_batches(settings, sampler)
    assert asked == []
    next(batches)
    assert asked == [0, 1]
    assert sum(1 for _ in batches) == -(-sampler.num_windows // 2) - 1 and asked == list(range(sampler.num_windows))
    model = new_model(CONFIGS["gpt2"], make_site(SerialGroup()), seed=3)
    few = config(data, tmp_path / "run", data_valid=str(data / "train"), data_valid_sequences=9, data_seq_len=8)
    monkeypatch.setattr(Sampler, "batch", lambda self, samples: tuple(x % 30 for x in real(self, samples)))
    streamed, held = (evaluate(model, kind(held_out_batches(few, sampler))) for kind in (iter, list))
    assert streamed == held


def test_memory_of_an_evaluation_does_not_grow_with_the_text(tmp_path: Path, data: Path) -> None:
    settings = config(data, tmp_path / "run", data_valid=str(data / "train"), data_valid_sequences=0)
    sampler = open_data(settings).valid
    assert sampler is not None

    class Repeated(Sampler):
        """Its windows begin again where the file ends."""

        def __init__(self) -> None:
            self.tokens, self.seq_len, self.seed, self.num_windows = sampler.tokens, sampler.seq_len, None, 20_000

        def batch(self, samples: Any) -> Any:
            return sampler.batch([sample % 200 for sample in samples])

    tracemalloc.start()
    for _ in held_out_batches(settings, Repeated()):
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000  # all batches together: 20,000 windows of 8 tokens, inputs and targets, are above 2.5 MB
