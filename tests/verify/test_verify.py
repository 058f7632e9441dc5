"""The command `mpitp verify`: what it prints, its exit codes, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.planted_bugs import FAULTS
from mpitp.checkpoint.hf import Documents, save_model
from mpitp.checkpoint.load import ModelSource, load_model
from mpitp.cli import main
from mpitp.comm import Group, SerialGroup, run_threads
from mpitp.errors import ConfigError, NumericError, UsageError
from mpitp.layers.site import Site, make_site
from mpitp.models import Batch, CausalLM, build_model
from mpitp.verify import source as sources
from mpitp.verify.batches import random_batch
from mpitp.verify.compare import EXACT, Tolerance, compare
from mpitp.verify.record import Record
from mpitp.verify.run import Report, Settings, finite_differences, verify
from mpitp.verify.source import (
    Source,
    SourceArguments,
    check_memory,
    needed_bytes,
    parse_layers,
    shake,
    source_of,
)
from tests.command_on_threads import command_on_threads
from tests.models.model_cases import GPT2, make_model
from tests.verify.cases import CONFIGS

ROOT = Path(__file__).resolve().parents[2]
MODEL = str(ROOT / "tests/parity/golden/llama-gqa")


def on_threads(ranks: int, *words: str) -> list[int]:
    return command_on_threads(ranks, "verify", *words)


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A run file with its prepared text: a GPT-2 from scratch, dropout and all."""
    folder = tmp_path_factory.mktemp("verify")
    (folder / "text").write_text("Verification is the confirmation that the numbers are what they should be. " * 9)
    assert main(["data", "prepare", str(folder / "text"), "--tokenizer", "bytes", "--out", str(folder / "data")]) == 0
    fields = "\n".join(f"{key} = {json.dumps(value)}" for key, value in GPT2.items() if key != "vocab_size")
    data = f'[data]\ntrain = "{folder}/data"\nseq_len = 8\n'
    train = f'[train]\nsteps = 1\nglobal_batch_size = 2\nmicro_batch_size = 2\nrun_dir = "{folder}/run"\n'
    (folder / "run.toml").write_text(f"[model]\n{fields}\n{data}{train}")
    yield str(folder / "run.toml")
    assert not (folder / "run").exists(), "verify writes nothing"


def test_a_process_of_its_own() -> None:
    """As a shell runs it: the report on stdout, on stderr only that one rank proves little."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mpitp", "verify", "--model", MODEL]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert re.fullmatch("mpitp verify: on one rank the model is compared with itself; .* launch -n 2 .*\n", done.stderr)
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["name", "what", "shape", "largest", "abs", "relative", "verdict"]
    names = [line.split()[0] for line in lines[1:-2]]
    forward, backward = names.index("final_norm"), names.index("final_norm", names.index("final_norm") + 1)
    assert names[0] == "embedding" and names.index("blocks.0.attention.heads") < forward < backward
    assert lines[-1].startswith("equal: ") and "of 1 rank with the one-rank model" in lines[-1]


@pytest.mark.parametrize("ranks", [2, 3])
def test_equal_on_several_ranks(ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", MODEL, "--dtype", "float64", "--steps", "2", "--finite-differences", "5")
    assert on_threads(ranks, *words) == [0] * ranks
    printed = capsys.readouterr()
    assert f"comparisons of {ranks} ranks with the one-rank model" in printed.out and printed.err == ""
    for expected in ("change of the weights", "gradient norm of step 2", "loss of step 2", "parameter  "):
        assert expected in printed.out


def test_report_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert on_threads(2, "--model", MODEL, "--json", "--dtype", "float64", "--finite-differences", "3") == [0, 0]
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True and report["ranks"] == 2 and set(report["first_in"].values()) == {None}
    assert len(report["finite_differences"]) == 3
    first = report["rows"][0]
    assert set(first) == {"name", "kind", "shape", "largest_abs", "largest_rel", "replicas", "ok", "axis"}
    assert {row["kind"] for row in report["rows"]} == {"start", "y", "dx", "grad", "value"}


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("missing all-reduce forward", "first in forward order: blocks.1.mlp.down (output; REPLICAS DIFFER by "),
        ("missing all-reduce of dx", "first in backward order: blocks.1.attention.qkv (gradient of the input; REPL"),
        ("norm counts replicas", "first in values: gradient norm (value; DIFFERENT)"),
    ],
)
def test_difference_is_exit_code_5_on_every_rank(fault: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with FAULTS[fault].planted():
        assert on_threads(2, "--model", MODEL) == [5, 5]
        text = capsys.readouterr().out
        assert on_threads(2, "--model", MODEL, "--failures-only", "--json") == [5, 5]
        report = json.loads(capsys.readouterr().out)
    assert "\n\nDIFFERENT: " in text and f"\n  {line}" in text
    assert report["ok"] is False and line.split(": ")[1].split(" (")[0] in report["first_in"].values()


def verified(group: Group, make: Any, batch: Batch) -> Report:
    return verify(make_site(group), make, batch, Settings(EXACT))


@pytest.fixture
def damaged_model(tmp_path: Path) -> str:
    """A model directory with NaN in two rows of a tensor that ranks cut, and an infinity in one that all hold."""
    model = load_model(MODEL, make_site(SerialGroup()))
    params = dict(model.named_params())
    params["blocks.1.mlp.down.weight"].data[:2, -1] = np.nan
    params["blocks.0.norm1.weight"].data[3] = np.inf
    save_model(model, tmp_path / "damaged", SerialGroup(), Documents(model.config.hf))
    return str(tmp_path / "damaged")


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("words", [(), ("--json",), ("--layers", "1:2")])
def test_weights_that_are_not_finite_are_said_once(
    ranks: int, words: tuple[str, ...], damaged_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = source_of(SourceArguments(damaged_model, None, layers="1:2" if "--layers" in words else None))
    batch = random_batch(source[0].model.config, batch=2, seq=4, seed=1)
    with pytest.raises(NumericError) as caught:
        run_threads(ranks, verified, source[0].make, batch)
    norm, down = "model.layers.0.input_layernorm.weight (1 of", "model.layers.1.mlp.down_proj.weight (2 of"
    assert str(caught.value).startswith("weights are not finite (NaN or infinite), so there is nothing to compare: ")
    assert down in str(caught.value) and (norm in str(caught.value)) == ("--layers" not in words)
    if ranks == 1:
        assert main(["verify", "--model", damaged_model, *words]) == 5
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.count("NumericError: ") == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_oracle_that_is_not_finite_is_said_once(ranks: int) -> None:
    def make(site: Site) -> CausalLM:
        model = make_model(site.ranks, CONFIGS["llama"], "float32")
        for name, param in model.named_params():
            if name.startswith("blocks.1.mlp"):
                param.data[...] = 1e25
        return model

    batch = random_batch(CONFIGS["llama"], batch=2, seq=4, seed=1)
    with np.errstate(all="ignore"), pytest.raises(NumericError, match=r"first in blocks\.1\.mlp\S* \(output\), \d+ of"):
        run_threads(ranks, verified, make, batch)


def test_failures_only(capsys: pytest.CaptureFixture[str]) -> None:
    with FAULTS["norm counts replicas"].planted():
        assert on_threads(2, "--model", MODEL, "--failures-only") == [5, 5]
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("gradient norm  value  -") and lines[2] == "" and len(lines) == 5


def test_failures_only_of_an_equal_layout_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert on_threads(2, "--model", MODEL, "--failures-only") == [0, 0]
    assert capsys.readouterr().out.startswith("equal: ")


def test_wide_tolerance_lets_a_fault_pass(capsys: pytest.CaptureFixture[str]) -> None:
    with FAULTS["norm counts replicas"].planted():
        assert on_threads(2, "--model", MODEL, "--tolerance", "10") == [0, 0]
    assert "(gradient norm, value)" in capsys.readouterr().out


@pytest.mark.parametrize("ranks", [2, 3])
def test_invariant_mode_is_equal_to_the_last_bit(ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert on_threads(ranks, "--model", MODEL, "--invariant", "--steps", "2") == [0] * ranks
    assert "with the one-rank model, to the last bit" in capsys.readouterr().out
    assert on_threads(ranks, "--model", MODEL, "--tolerance", "0") == [5] * ranks  # so that the one above could fail


def test_some_layers_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert on_threads(2, "--model", MODEL, "--layers", "1:2", "--json") == [0, 0]
    names = {row["name"] for row in json.loads(capsys.readouterr().out)["rows"]}
    assert "blocks.0.mlp" in names and "blocks.1.mlp" not in names
    one = Source(ModelSource(CONFIGS["llama"], None, 3, range(1)), "float64").make(make_site(SerialGroup()))
    assert len(one.blocks) == 1


def test_chosen_layers_are_the_directorys_own() -> None:
    config = sources.load_config(MODEL)
    site = make_site(SerialGroup(), dtype="float64")
    whole = Source(ModelSource(config, Path(MODEL)), "float64").make(site)
    part = Source(ModelSource(config, Path(MODEL), blocks=range(1, 2)), "float64").make(site)
    for name in ("norm1.weight", "attention.qkv.weight", "mlp.down.weight"):
        np.testing.assert_array_equal(part.blocks[0].params()[name].data, whole.blocks[1].params()[name].data)


@pytest.mark.parametrize("words", [("--set", "train.seed=5"), ("--invariant",), ("--layers", ":1", "--steps", "1")])
def test_run_file(run_file: str, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert on_threads(3, "--config", run_file, "--json", *words) == [0, 0, 0]
    rows = json.loads(capsys.readouterr().out)["rows"]
    shapes = {row["name"]: row["shape"] for row in rows if row["kind"] == "y"}
    edges = 2 * (6 if "--invariant" in words else 3)  # of the vocabulary's blocks, or of its ranks
    assert shapes["embedding dropout"] == [16 + edges, 12] and "blocks.0.dropout1" in shapes


def test_run_file_that_asks_for_the_invariant_mode(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert on_threads(2, "--config", run_file, "--set", "train.invariant=true", "--steps", "1") == [0, 0]
    assert "with the one-rank model, to the last bit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--model", MODEL, "--layers", "0:9"], 2, "--layers 0:9: expected A:B within 0:"),
        (["--model", MODEL, "--layers", "1"], 2, "--layers 1: expected A:B"),
        (["--model", MODEL, "--layers", "a:b"], 2, "--layers a:b: expected A:B"),
        (["--model", MODEL, "--layers", "1:1"], 2, "--layers 1:1: expected A:B"),
        (["--model", MODEL, "--set", "train.steps=1"], 2, "it goes with --config"),
        (["--model", MODEL, "--steps", "-1"], 2, "--steps must be at least 0"),
        (["--model", MODEL, "--finite-differences", "2"], 2, "needs --dtype float64"),
        (["--model", MODEL, "--tolerance", "nan"], 2, "--tolerance must be a number of at least 0"),
        (["--model", MODEL, "--batch", "0"], 2, "--batch and --seq must be at least 1"),
        (["--model", MODEL, "--seq", "4096"], 2, "exceeds the model's"),
        (["--model", MODEL, "--invariant-blocks", "2"], 3, "add --invariant, or drop the blocks"),
        (["--config", "none.toml", "--seq", "8"], 2, "--seq is of the random batch of --model"),
        (["--config", "none.toml", "--seed", "0"], 2, "--seed is of the random batch of --model"),
        (["--model", "none"], 4, "none"),
        (["--config", "none.toml"], 3, "none.toml"),
        ([], 2, "--model --config is required"),
        (["--model", MODEL, "--invariant", "--invariant-blocks", "999"], 3, "use a number from 1 to "),
    ],
)
def test_mistakes_are_one_message(
    words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *words]) == code
    printed = capsys.readouterr()
    assert message in printed.err and "Traceback" not in printed.err and printed.out == ""


# Memory


def test_model_that_does_not_fit_twice_is_refused_with_layers_that_do() -> None:
    source = Source(ModelSource(CONFIGS["gpt2"]), "float32")
    need = needed_bytes(source, ranks=2, steps=0)
    assert need == int(source.num_elements() * 4 * 4 * 1.5)
    check_memory(source, 2, 0, need)
    check_memory(source, 2, 0, None)
    with pytest.raises(ConfigError, match=r"needs 0.00 GiB on rank 0 .*: --layers 0:1$"):
        check_memory(source, 2, 0, need - 1)
    with pytest.raises(ConfigError):
        check_memory(source, 2, 1, need)


@pytest.mark.parametrize(("layers", "offered"), [(None, range(0, 14)), (range(8, 24), range(8, 22))])
def test_offered_layers_are_the_most_that_fit(layers: range | None, offered: range) -> None:
    config = sources.dataclasses.replace(CONFIGS["llama"], num_layers=24)

    def source(chosen: range | None) -> Source:
        return Source(ModelSource(config, blocks=chosen), "float32")

    available = needed_bytes(source(range(14)), 2, 0)
    with pytest.raises(ConfigError, match=f"--layers {offered.start}:{offered.stop}$"):
        check_memory(source(layers), 2, 0, available)
    check_memory(source(offered), 2, 0, available)


def test_model_of_which_no_single_layer_fits() -> None:
    source = Source(ModelSource(CONFIGS["gpt2"]), "float32")
    with pytest.raises(ConfigError, match="not even one layer fits .*; use a host with more memory"):
        check_memory(source, 2, 0, 1000)


def test_command_offers_layers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    need = needed_bytes(Source(ModelSource(sources.load_config(MODEL)), "float32"), 1, 0)
    monkeypatch.setattr(sources, "available_bytes", lambda: need - 1)
    assert main(["verify", "--model", MODEL]) == 3
    words = capsys.readouterr().err.split()
    assert words[-2] == "--layers"
    assert main(["verify", "--model", MODEL, "--layers", words[-1]]) == 0


def test_num_elements_counts_the_whole_model() -> None:
    for config in CONFIGS.values():
        model = build_model(config, make_site(SerialGroup()))
        expected = sum(param.data.size for _, param in model.named_params())
        assert Source(ModelSource(config), "float32").num_elements() == expected


@pytest.mark.parametrize(("text", "chosen"), [("0:4", range(4)), (":2", range(2)), ("3:", range(3, 6)), (None, None)])
def test_layers(text: str | None, chosen: range | None) -> None:
    assert parse_layers(text, 6) == chosen


def test_layers_outside_the_model() -> None:
    with pytest.raises(UsageError):
        parse_layers("-1:2", 6)


# Finite differences


def differences(group: Group, name: str, damage: Any) -> list[bool]:
    model = make_model(group, CONFIGS[name])
    if damage is not None:
        damage(model)
    return [check.ok for check in finite_differences(model, random_batch(model.config, 2, 5, 0), 25)]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", CONFIGS)
def test_finite_differences(name: str, ranks: int) -> None:
    assert run_threads(ranks, differences, name, None) == [[True] * 25] * ranks


def double_gelu_gradient(model: Any) -> None:
    """A mistake in the arithmetic that every layout shares: the one-rank model is no help against it."""
    down = model.blocks[0].mlp.down
    backward = down.backward
    down.backward = lambda dy, ctx: 2 * backward(dy, ctx)


@pytest.mark.parametrize("ranks", [1, 2])
def test_finite_differences_find_what_all_layouts_do_wrong(ranks: int) -> None:
    found = run_threads(ranks, differences, "gpt2", double_gelu_gradient)
    assert found[0] == found[-1] and not all(found[0]) and any(found[0])


def test_wrong_gradient_is_exit_code_5(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def make(source: Source, site: Site) -> Any:
        model = made(source, site)
        double_gelu_gradient(model)
        return model

    made = Source.make
    monkeypatch.setattr(Source, "make", make)
    words = ("--model", MODEL, "--dtype", "float64", "--finite-differences", "30")
    assert on_threads(2, *words) == [5, 5]
    text = capsys.readouterr().out
    assert "\nequal: " in text and "\nWRONG: " in text and "finite differences, the first in " in text


# Comparison


def compared(group: Group, arrays: list[Any], reference: Any, tolerance: Tolerance) -> Any:
    own = [Record("a", "y", np.array(arrays[group.rank]))]
    rows = compare(group, own, [Record("a", "y", np.array(reference))] if group.rank == 0 else None, tolerance)
    return (rows[0].ok, rows[0].largest_abs, rows[0].replicas) if rows else None


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ([[1.0, 2.0], [1.0, 2.0]], (True, 0.0, 0.0)),
        ([[1.0, 2.5], [1.0, 2.5]], (False, 0.5, 0.0)),
        ([[1.0, 2.0], [1.0, 2.25]], (False, 0.0, 0.25)),  # rank 0 is right, but its replica isn't
        ([[1.0, NAN], [1.0, NAN]], (False, INF, 0.0)),
        ([[1.0, 2.0], [1.0, INF]], (False, 0.0, INF)),
        ([[1.0, 2.0 + 1e-12], [1.0, 2.0 + 1e-12]], (True, pytest.approx(1e-12, rel=0.01), 0.0)),
    ],
)
def test_replicated_arrays(arrays: list[Any], expected: Any) -> None:
    assert run_threads(2, compared, arrays, [1.0, 2.0], Tolerance(1e-10, 0.0))[0] == expected


def test_zero_tolerance_takes_equal_bits_only() -> None:
    assert run_threads(2, compared, [[1.0], [1.0]], [1.0], EXACT)[0][0]
    assert not run_threads(2, compared, [[1.0], [1.0]], [1.0 + 2**-52], EXACT)[0][0]


def test_floor_is_a_share_of_the_largest_array_of_the_kind() -> None:
    def small_difference(group: Group, floor: float) -> Any:
        def records(small: float) -> list[Record]:
            return [Record("big", "dx", np.array([8.0])), Record("small", "dx", np.array([small]))]

        oracle = records(1e-9) if group.rank == 0 else None
        return [row.ok for row in compare(group, records(2e-9), oracle, Tolerance(1e-4, 0.0, floor))]

    assert run_threads(2, small_difference, 0.0)[0] == [True, False]
    assert run_threads(2, small_difference, 1e-4)[0] == [True, True]


def test_fresh_models_are_shaken_alike_in_every_layout() -> None:
    def shaken(group: Group) -> dict[str, np.ndarray]:
        model = build_model(CONFIGS["gpt2"], make_site(group))
        shake(model, seed=1)
        return {name: param.data for name, param in model.named_params() if param.placement.is_replicated}

    whole = run_threads(1, shaken)[0]
    assert any("bias" in name for name in whole)
    for part in run_threads(3, shaken):
        for name, values in part.items():
            np.testing.assert_array_equal(values, whole[name])
            assert values.any() == (name != "positions.weight")  # that one is drawn by init_params
