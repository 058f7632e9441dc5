"""`mpitp plan RUN.toml`: what it prints, draws and writes, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from mpitp.cli import main
from mpitp.config import run_config_from
from mpitp.errors import ConfigError
from mpitp.plan.choice import AS_FAST
from mpitp.plan.job_file import job_text
from mpitp.plan.layout import Layout
from mpitp.plan.run_file_edit import edit_run_file
from mpitp.plan.search_command import num_bytes
from tests.plan.cases import machine

RUN = """\
# my run
[model]
model_type = "gpt2"
n_embd = 48
n_head = 6
n_layer = 4
n_positions = 32
vocab_size = 301
[data]
train = "none"
seq_len = 16
[mesh]  # the layout
tp = 2       # mine
schedule = "zb"
stages = [1, 3]
pp = 2

[train]
steps = 1
global_batch_size = 24
run_dir = "none"
"""
MIXTURE = """\
[model]
model_type = "mixtral"
hidden_size = 48
num_attention_heads = 6
num_key_value_heads = 3
num_hidden_layers = 2
intermediate_size = 40
num_local_experts = 3
num_experts_per_tok = 1
vocab_size = 301
max_position_embeddings = 32
"""
MACHINE = Path(__file__).parents[2] / "examples" / "machines" / "ethernet_cpu.toml"


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN, encoding="utf-8")
    return path


def plan(run_file: Path, *words: str) -> int:
    return main(["plan", str(run_file), "--machine", str(MACHINE), *words])


def test_the_report(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--ranks", "6", "--memory", "1GiB", "--best", "2", "--compare", "tp=2,pp=1", "--compare", "pp=6")
    assert plan(run_file, *words) == 0
    told = capsys.readouterr().out
    assert "6 ranks of 10 Gbit/s Ethernet, 16 cores a node, 1 GiB a rank" in told
    assert "limited by" in told and "front of time and memory" in told
    assert "why not tp=2,pp=1?\n  tp=2 dp=3 micro=" in told and "times the best one's" in told
    assert "why not pp=6?\n  it can't be: pp=6 is more than there are blocks: 4" in told
    assert run_file.read_text(encoding="utf-8") == RUN


def test_written_into_the_run_file_and_a_job(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = run_file.with_name("job.sbatch")
    assert plan(run_file, "--ranks", "24", "--write", "--job", str(job)) == 0
    capsys.readouterr()
    text = run_file.read_text(encoding="utf-8")
    config = run_config_from(tomllib.loads(text))
    assert config.mesh.pp * config.mesh.dp * config.mesh.cp * config.mesh.tp == 24
    assert text.startswith("# my run\n") and "# mine\n" in text and "[mesh]  # the layout\n" in text
    assert subprocess.run(["bash", "-n", str(job)], check=False).returncode == 0
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks=24\n#SBATCH --ntasks-per-node=12\n" in job.read_text(encoding="utf-8")
    assert sorted(entry.name for entry in run_file.parent.iterdir()) == ["job.sbatch", "run.toml"]


@pytest.mark.parametrize("shares, stay", [('"measured"', True), ("[2, 1]", False)])
def test_weights_of_other_ranks_are_left_out(
    shares: str, stay: bool, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On one rank: two weights along tp are those of another layout."""
    run_file.write_text(RUN.replace("pp = 2\n", f"pp = 2\nshares = {shares}\n"), encoding="utf-8")
    assert plan(run_file, "--ranks", "1", "--write") == 0
    assert ("mesh.shares is left out of" in capsys.readouterr().out) is not stay
    assert ("\nshares = " in run_file.read_text(encoding="utf-8")) is stay


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="draws with matplotlib")
def test_the_front_as_a_picture(run_file: Path) -> None:
    picture = run_file.with_name("front.svg")
    assert plan(run_file, "--ranks", "4", "--pareto", str(picture)) == 0
    assert "<svg" in picture.read_text(encoding="utf-8")


def test_numbers(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(run_file, "--ranks", "20", "--json", "--best", "1") == 0
    told = json.loads(capsys.readouterr().out)
    best = told["best"][0]
    assert best["seconds"] == pytest.approx(sum(best["parts"].values()))
    assert told["across"] is None or told["across"]["layout"]["tp"] > 16


def test_fewer_ranks_that_are_as_fast(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """13 ranks can only be replicas, and 24 sequences take as many rounds on 12 of them; a part of 24 is no worse."""
    assert plan(run_file, "--ranks", "13", "--best", "1", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    fewer = told["fewer"]["layout"]
    assert fewer["pp"] * fewer["dp"] * fewer["cp"] * fewer["tp"] < 13
    assert told["fewer"]["seconds"] <= AS_FAST * told["best"][0]["seconds"]
    assert plan(run_file, "--ranks", "13", "--best", "1") == 0
    assert " ranks are as fast: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--ranks", "4", "--memory", "200KiB"), "no layout on 4 ranks fits into 200 KiB a rank: the least is"),
        (("--ranks", "4", "--set", "train.global_batch_size=0"), "train.global_batch_size isn't set"),
        (("--ranks", "4", "--set", "train.invariant=true"), "train.invariant"),
        (("--ranks", "4", "--set", "model.dtype=float16"), "no products.float16"),
        (("--ranks", "997"), "997 ranks can't be cut into axes: tp goes to 6"),
        (("--ranks", "4", "--compare", "tp=3"), "= 3 ranks, expected 4"),
        (("--ranks", "4", "--pareto", "front.pdf"), "must end in .svg or .png"),
        (("--ranks", "4", "--memory", "much"), "no size of memory"),
        (("--ranks", "4", "--write", "--set", "train.steps=2"), "leave out one"),
    ],
)
def test_refused(run_file: Path, words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(run_file, *words) in (2, 3)
    assert told in capsys.readouterr().err


def test_experts_over_ep(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run file's own ep is one of the layouts; more of it than there are experts is refused as a layout is."""
    run_file.write_text(MIXTURE + RUN[RUN.index("[data]") :].replace("24", "4"), encoding="utf-8")
    words = ("--set", "mesh.ep=2", "--compare", "ep=2", "--compare", "ep=4", "--best", "1", "--json")
    assert plan(run_file, "--ranks", "4", *words) == 0
    apart, refused = json.loads(capsys.readouterr().out)["compared"]
    assert apart["cost"]["layout"]["ep"] == apart["cost"]["layout"]["dp"] == 2
    assert apart["cost"]["parts"]["exchange over ep"] > 0
    assert refused["cost"] is None and "ep=4 is more than there are experts: 3" in refused["refusal"]


def test_without_a_machine(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "search", str(run_file), "--ranks", "2"]) == 3
    assert "which machine?" in capsys.readouterr().err


def test_a_run_file_in_another_form_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    for text in ("mesh = {stages = [\n  1, 2]}\n", "mesh.tp = 2\n", "[mesh]\nstages = [\n  1,\n  2,\n]\ntp = 2\n"):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match="write there:\n.mesh.\n.*tp = 3"):
            edit_run_file(path, {"mesh": {"tp": 3}})
        assert path.read_text(encoding="utf-8") == text


def test_keys_are_added_where_their_section_ends(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[mesh]\ntp = 2 # two\n\n# of training\n[train]\nsteps = 1", encoding="utf-8")
    edit_run_file(path, {"mesh": {"tp": 3, "dp": 2}, "train": {"recompute": "full"}, "optim": {"zero": 1}})
    assert path.read_text(encoding="utf-8") == (
        '[mesh]\ntp = 3 # two\ndp = 2\n\n# of training\n[train]\nsteps = 1\nrecompute = "full"\n\n[optim]\nzero = 1\n'
    )


def test_tables_of_one_line_are_edited_where_they_are(tmp_path: Path) -> None:
    path, data = tmp_path / "run.toml", 'data = {train = "a, b = {c}"}\n'
    rest = "[optim]\nmesh = 1\n"
    path.write_text(
        f'mesh = {{stages = [1, 2], tp = 2, pp=2}} # two\ntrain = {{recompute = "full"}}\n{data}{rest}',
        encoding="utf-8",
    )
    edit_run_file(path, {"mesh": {"tp": 3, "dp": 2}, "train": {"recompute": "none", "seed": 1}, "data": {}})
    assert path.read_text(encoding="utf-8") == (
        f'mesh = {{tp = 3, pp=2, dp = 2}} # two\ntrain = {{recompute = "none", seed = 1}}\n{data}{rest}'
    )
    edit_run_file(path, {"data": {"seq_len": 8}})
    assert 'data = {train = "a, b = {c}", seq_len = 8}\n' in path.read_text(encoding="utf-8")


def test_lines_end_as_they_did(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"[mesh]\r\ntp = 2 # two\r\nstages = [1]\r\n\r\n[train]\r\nsteps = 1\r\n")
    edit_run_file(path, {"mesh": {"tp": 3, "dp": 2}})
    assert path.read_bytes() == b"[mesh]\r\ntp = 3 # two\r\ndp = 2\r\n\r\n[train]\r\nsteps = 1\r\n"


def test_jobs_of_gpu_nodes_and_sizes_in_words() -> None:
    text = job_text(Layout(tp=8, dp=2), machine("fat_tree_gpu"), "my run.toml")
    assert "#SBATCH --nodes=2" in text and "#SBATCH --gpus-per-node=8" in text and "train 'my run.toml'" in text
    assert [num_bytes(text) for text in ("32GiB", "80e9", "512 MB", "7")] == [2**35, 80e9, 512e6, 7]
