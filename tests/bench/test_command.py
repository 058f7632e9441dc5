"""The verb from its options to its output, on tiny sizes; no statement about time."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitp.backend.threads import limit_blas_threads
from mpitp.bench import allreduce, command, decode, overlap, replicas, save, train
from mpitp.bench.machine import warnings_of
from mpitp.bench.products import attention_products, linear_products
from mpitp.bench.random_model import random_model
from mpitp.bench.sizes import config_of
from mpitp.comm import Group, SerialGroup, run_threads
from mpitp.errors import UsageError
from mpitp.layers.site import make_site

SIZES = "--layers 2 --hidden 24 --heads 3 --vocab 17 --ffn 10".split()
TRAIN = ["train", *SIZES, "--batch", "2", "--seq", "5", "--steps", "2"]
DECODE = ["decode", *SIZES, "--kv-heads", "1", "--head-dim", "8", "--prompt", "3", "--tokens", "3", "--rounds", "2"]


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict | list):
        return [x for item in (value.values() if isinstance(value, dict) else value) for x in numbers(item)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


def json_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    with limit_blas_threads(1):
        assert command.run(parsed(*words, "--json")) == 0
    facts = json.loads(capsys.readouterr().out)
    assert np.isfinite(numbers(facts)).all()
    return facts


@pytest.mark.parametrize("clock", ["wall", "cpu"])
def test_train_tells_step_floor_profile_and_invariant_cost(clock: str, capsys: pytest.CaptureFixture[str]) -> None:
    facts = json_of(
        [
            *TRAIN,
            "--invariant",
            "--sequence-parallel",
            "--recompute",
            "full",
            "--clock",
            clock,
            "--context-parallel",
            "heads",
        ],
        capsys,
    )
    assert facts["bench"] == "train"
    assert facts["tokens_per_step"] == 10
    assert facts["step_to_floor"]["least"] > 0
    assert facts["invariant"]["blocks"] == 3
    assert facts["sequence_parallel"]["step_least_seconds"] > 0
    assert facts["context_parallel"]["efficiency_least"] > 0
    assert facts["recompute"]["wish"] == "full" and facts["recompute"]["step_least_seconds"] > 0
    profile = facts["profile"]
    parts = sum(seconds for name, seconds in profile.items() if name != "total")
    assert parts == pytest.approx(profile["total"])
    assert {"linear products", "attention", "norms", "activation", "loss", "optimizer", train.REST} <= set(profile)
    assert facts["communication"]["expected"] == []


def test_decode_tells_bound_and_ratio_of_each_batch(capsys: pytest.CaptureFixture[str]) -> None:
    facts = json_of([*DECODE, "--batch", "2"], capsys)
    assert [row["batch"] for row in facts["batches"]] == [1, 2]
    per_block = (24 + 2 * 8) * 24 + 24 * 24 + 3 * 24 * 10
    assert facts["weight_bytes_a_rank"] == 4 * (2 * per_block + 17 * 24)
    assert not facts["weights_exceed_cache"]


def test_allreduce_tells_each_size(capsys: pytest.CaptureFixture[str]) -> None:
    facts = json_of(["allreduce", "--max-bytes", "5000"], capsys)
    assert [row["bytes"] for row in facts["sizes"]] == [1024, 4096]


@pytest.mark.parametrize("collective", ["all-reduce", "reduce-scatter", "all-gather"])
def test_collectives_over_simulated_nodes(collective: str) -> None:
    words = ["allreduce", "--max-bytes", "1024", "--collective", collective, "--ranks-per-node", "2"]
    facts, *others = run_threads(4, lambda group: allreduce.measure(parsed(*words), group))
    assert facts["ways"] == [allreduce.ONE_KIND, allreduce.HIERARCHICAL]
    assert set(facts["sizes"][0]["ways"]) == set(facts["ways"])
    assert all(other["sizes"] == facts["sizes"] for other in others)


@pytest.mark.parametrize("per_node", ["1", "3", "4"])
def test_ranks_that_make_no_nodes_are_refused(per_node: str) -> None:
    with pytest.raises(UsageError, match="--ranks-per-node must be at least 2 and cut 4 ranks"):
        words = ["allreduce", "--max-bytes", "1024", "--ranks-per-node", per_node]
        run_threads(4, lambda group: allreduce.measure(parsed(*words), group))


@pytest.mark.parametrize("words", [[*TRAIN, "--model", "llama"], DECODE, ["allreduce", "--max-bytes", "1024"]])
def test_the_report_is_lines_of_text(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with limit_blas_threads(1):
        assert command.run(parsed(*words)) == 0
    out = capsys.readouterr().out
    assert out.count("\n") >= 3
    assert "nan" not in out


def test_every_rank_measures_the_same_and_counts_the_closed_form() -> None:
    """Without the profile's functions, which are replaced in the whole process."""

    def check(group: Group) -> dict[str, Any]:
        args = parsed(*TRAIN)
        config = config_of(args, "gpt2", args.seq)
        batch = train.batch_to_time(config, args.batch, args.seq)
        model = random_model(config, make_site(group))
        return train._communication(train.step_of(model, batch), config, batch, model)

    first, second = run_threads(2, check)
    assert first == second
    assert (first["calls"], first["bytes_a_rank"]) == (first["expected_calls"], first["expected_bytes_a_rank"])


def test_overlap_tells_both_kinds_of_sum_on_every_rank() -> None:
    def check(group: Group) -> tuple[dict[str, Any], bool]:
        args = parsed(*TRAIN)
        config = config_of(args, "gpt2", args.seq)
        model = random_model(config, make_site(group))
        step = train.step_of(model, train.batch_to_time(config, args.batch, args.seq))
        return overlap.measure_overlap(step, group, 2), "start_all_reduce" in vars(group)

    first, second = run_threads(2, check)
    assert first == second and not first[1]
    assert set(first[0]) == set(overlap.KINDS)
    assert sum(row["calls"] for row in first[0].values()) == 4 * 2 + 2 + 2 + 1  # blocks, ends, loss, gradient norm
    steps = {"step_seconds": 1.0, "step_seconds_at_once": 2.0, "times_as_fast_least": 2.0, "times_as_fast_median": 2.1}
    assert len(overlap.overlap_lines(first[0], steps)) == 3 + len(overlap.KINDS)
    serial = SerialGroup()
    assert overlap.overlap_lines(overlap.measure_overlap(lambda: None, serial, 1), {}) == []
    assert overlap.compare_steps(lambda: None, serial, 1) == {}


def test_sums_at_once_take_the_place_of_started_ones() -> None:
    def check(group: Group) -> tuple[dict[str, Any], bool]:
        group.in_background = True
        pieces = []

        def step() -> None:
            pieces.append(group.in_background)
            group.start_all_reduce(np.ones(3)).wait()

        found = overlap.compare_steps(step, group, 3)
        assert pieces == [True, False] * 4  # a warm-up and three rounds
        return found, "start_all_reduce" in vars(group)

    (first, patched), (second, _) = run_threads(2, check)
    assert first == second and not patched
    assert min(first.values()) > 0


def test_decode_and_allreduce_on_two_ranks() -> None:
    first, second = run_threads(2, lambda group: decode.measure(parsed(*DECODE), group))
    assert first["batches"] == second["batches"]
    sizes = run_threads(2, lambda group: allreduce.measure(parsed("allreduce", "--max-bytes", "1024"), group))
    assert sizes[0] == sizes[1]
    assert sizes[0]["machine"]["ranks"] == 2


def test_floor_has_the_steps_flops() -> None:
    args = parsed(*TRAIN)
    model = random_model(config_of(args, "gpt2", 5), make_site(SerialGroup()))
    per_block = 4 * 24 * 24 + 2 * 24 * 10
    assert sum(product.flops for product in linear_products(model, 10)) == 3 * 2 * 10 * (2 * per_block + 17 * 24)
    products = attention_products(model, (5, 5))
    assert sum(product.flops for product in products) == 2 * 2 * 3 * 7 * 2 * 5 * 5 * 8  # blocks, sequences, heads, ...
    for product in (*products, *linear_products(model, 10)):
        assert (product.a @ product.b).shape == product.out.shape


@pytest.mark.parametrize(
    "words, message",
    [
        ([*TRAIN, "--steps", "0"], "--steps must be at least 1, got 0"),
        ([*TRAIN, "--heads", "-1"], "--heads must be at least 1"),
        ([*TRAIN, "--kv-heads", "1"], "use --model llama"),
        ([*DECODE, "--tokens", "1"], "--tokens must be at least 2"),
        (["allreduce", "--max-bytes", "3"], "--max-bytes must be at least 1024"),
    ],
)
def test_sizes_that_cannot_be_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        command.run(parsed(*words))


def test_warnings() -> None:
    quiet = {"cores": 4, "ranks_on_host": 2, "blas_threads": 1, "ranks": 2}
    assert warnings_of({**quiet, "blas_threads": 1, "cores": 2}) == []
    assert "share 1 cores" in warnings_of({**quiet, "cores": 1})[0]
    assert "OMP_NUM_THREADS=2" in warnings_of({**quiet, "blas_threads": 4})[0]
    assert "2 threads" in warnings_of({**quiet, "blas_threads": 2})[0]


def test_save_tells_ratios_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = json_of(["save", *SIZES, "--rounds", "2", "--dir", str(tmp_path)], capsys)
    assert set(facts["seconds"]) == {save.PLAIN, save.SAVE, save.COPY, save.STALL}
    assert facts["checkpoint_to_plain"]["median"] > 0 and facts["standstill_to_copy"]["least"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ranks", [2, 3])
def test_save_counts_the_state_once_on_several_ranks(ranks: int, tmp_path: Path) -> None:
    args = parsed("save", *SIZES, "--rounds", "1", "--dir", str(tmp_path))
    found = [facts["state_bytes"] for facts in run_threads(ranks, lambda group: save.measure(args, group))]
    assert found == [save.measure(args, SerialGroup())["state_bytes"]] * ranks
    assert save.report(save.measure(args, SerialGroup()))[-2].startswith("checkpoint / plain writes")


def test_replicas_are_measured_against_ranks_by_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["replicas", *SIZES, "--batch", "2", "--seq", "5", "--rounds", "1"]
    facts = json_of(words, capsys)
    assert set(facts["steps"]) == {"alone", "apart", "zero 0", "zero 1", "zero 2", "zero 3"}
    assert facts["steps"]["apart"]["apart_least"] == 1.0
    two = run_threads(2, lambda group: replicas.measure(parsed(*words), group))
    assert two[0]["steps"] == two[1]["steps"] and two[0]["tokens_per_step"] == 2 * facts["tokens_per_step"] == 40
    assert len(replicas.report(two[0])) == 9


def test_serve_tells_what_company_gains_and_what_the_server_costs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("fastapi")
    facts = json_of(["serve", *SIZES, "--texts", "3", "--prompt", "4", "--tokens", "5", "--rounds", "2"], capsys)
    assert set(facts["tokens_per_second"]) == {"one", "many", "server"}
    assert facts["many_to_one"]["least"] > 0 and facts["server_of_engine"]["median"] > 0
    assert 1 <= facts["steps_to_first_token"] <= 3
    assert facts["ranks"] == 1 and facts["texts"] == 3
