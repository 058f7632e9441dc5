"""The course: every command of its index page works as it is written, and so does every exercise's one-line change."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from examples.planted_bugs import COURSE, FAULTS, choices, course_config
from mpitp.comm import Group, run_threads
from mpitp.comm.abort import INTERRUPTED
from mpitp.layers import Site, make_site
from mpitp.models import CausalLM, new_model
from mpitp.verify.batches import random_batch
from mpitp.verify.command import default_tolerance
from mpitp.verify.run import Report, Settings, verify
from mpitp.verify.source import shake

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.glob("[0-9][0-9]_*.py"))
PAGE = (EXAMPLES / "README.md").read_text(encoding="utf-8")
INSTALLING = ("python3 -m venv", "source ", "pip install")  # done by hand; the rest is run here
SECONDS = 60
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_osc": "^ucx",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def commands() -> list[str]:
    lines = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
    return [line for line in lines if not line.startswith(INSTALLING)]


def run(words: list[str], folder: Path = ROOT, seconds: float = SECONDS) -> subprocess.CompletedProcess[str]:
    """Run a command as a student would, in an environment where this Python comes first."""
    env = {**os.environ, **OPEN_MPI, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    env = {name: value for name, value in env.items() if not name.startswith(("PMI", "OMPI_COMM", "COVERAGE"))}
    return subprocess.run(
        words, cwd=folder, env=env, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL
    )


def test_the_page_names_every_script_once_and_in_order() -> None:
    assert len(SCRIPTS) == 19
    alone = [line.split()[1] for line in commands() if re.fullmatch(r"python \S+", line)]
    assert alone == [f"examples/{path.name}" for path in SCRIPTS]
    assert re.findall(r"^\| \[\d\d\]\((.*?)\)", PAGE, re.MULTILINE) == [path.name for path in SCRIPTS]


def test_links_of_the_page_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)]+)\)", PAGE)
    assert links and [link for link in links if not (EXAMPLES / link).exists()] == []


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_are_short_and_say_what_they_are(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) < 100
    assert lines[0].startswith(f'"""{path.stem[:2]}  ')


@pytest.mark.slow
@pytest.mark.parametrize("command", commands())
def test_command_works_as_written(command: str) -> None:
    words = shlex.split(command)
    on_processes = words[0] == "mpirun" or "launch" in words
    if on_processes and not (Path(sys.executable).parent / "mpiexec").exists():
        pytest.skip("this environment has no mpiexec")
    done = run(words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if len(line) > 80] == []
    assert "WRONG" not in done.stdout
    if "12_what_breaks.py " in command:
        assert any(text in done.stdout for text in ("Which layer", "The layer is wrong", FAULTS[COURSE[11]].mistake))
        return
    if "check.py" in command:
        assert "SCORE  0 of" in done.stdout or done.stdout.startswith("01 ")
        return
    proofs, exercise = done.stdout.find("PROOF"), done.stdout.find("EXERCISE")
    assert 0 <= proofs < exercise
    assert all(line.startswith(("EXERCISE", " ")) for line in done.stdout[exercise:].splitlines())
    if words[0] == "python":
        assert done.stderr == ""


# Script, the line to change, the changed one, and what then is printed.
EXERCISES = [
    ("01", "T, K, N = 4, 6, 5", "T, K, N = 40, 6, 5", "x, 240 numbers; it could have been W, 30"),
    ("01", "T, K, N = 4, 6, 5", "T, K, N = 4, 2, 5", "x (4, 0)  W (5, 0)  ->  first row of partial y [0. 0. 0. 0. 0.]"),
    ("02", "FFN = 5, 4, 8", "FFN = 5, 4, 2", "rank 2   FFN columns 0:0  Wup (0, 4)  Wdown (4, 0)"),
    (
        "03",
        "dx = linear.backward(dy, ctx)",
        "linear.backward(dy, ctx); dx = dy @ linear.product.weight.data",
        "WRONG  dx is that",
    ),
    ("04", "KV_HEADS, HEAD_DIM, HIDDEN = 9, 3", "KV_HEADS, HEAD_DIM, HIDDEN = 9, 1", "dk and dv of KV head 0"),
    (
        "04",
        "KV_HEADS, HEAD_DIM, HIDDEN = 9, 3",
        "KV_HEADS, HEAD_DIM, HIDDEN = 9, 9",
        "backward:  all_reduce(sum) [8, 6]",
    ),
    ("05", "VOCAB, HIDDEN = 50, 4", "VOCAB, HIDDEN = 50000, 4", "exchanged 120 bytes; all logits would be 2000000"),
    ("06", "RANKS = 3", "RANKS = 2", "backward: 2 collectives"),
    (
        "07",
        "make_site(group)",
        'make_site(group, dtype="float64")',
        "PROOF  losses of all 60 steps: largest difference",
    ),
    ("08", "RANKS = 3", "RANKS = 7", "PROOF  the invariant layout gave 1 different"),
    ("08", "blocks=0", "blocks=3", "PROOF  the invariant layout gave 1 different"),
    ("09", "RANKS = 3", "RANKS = 5", "PROOF  ledger"),
    ("10", "group.rank % 2 == 0", "True", "PROOF  ring against the library"),
    (
        "17",
        "[:, :CHOSEN]",
        "[:, :CHOSEN]; chosen[:] = [0, 1]",
        "rank 2   experts 5:7, rows for them [0, 0]",
    ),
    ("18", '"n_layer": 24', '"n_layer": 12', "25 of 32 layouts fit into 4 GB"),
    ("19", "IMAGES, HEIGHT, WIDTH = 2, 12", "IMAGES, HEIGHT, WIDTH = 2, 3", "PROOF  by rows"),
    ("11", "TOKENS, HIDDEN = 256, 256", "TOKENS, HIDDEN = 256, 128", "a block (h 128, t 256)"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "line", "changed", "printed"), EXERCISES)
def test_exercise_is_one_change_away(number: str, line: str, changed: str, printed: str, tmp_path: Path) -> None:
    script = next(path for path in SCRIPTS if path.name.startswith(number))
    text = script.read_text(encoding="utf-8")
    assert text.count(line) >= 1
    (tmp_path / script.name).write_text(text.replace(line, changed, 1), encoding="utf-8")
    shutil.copy(EXAMPLES / "course.py", tmp_path)
    shutil.copytree(EXAMPLES / "machines", tmp_path / "machines")
    done = run([sys.executable, script.name], tmp_path, 100)
    assert printed in done.stdout, done.stdout + done.stderr
    assert (done.returncode != 0) == printed.startswith("WRONG")


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("number", range(1, len(COURSE) + 1))
def test_answers_of_example_12_are_right_on_any_number_of_ranks(number: int, ranks: int) -> None:
    config, fault = course_config(number), FAULTS[COURSE[number - 1]]

    def make(site: Site) -> CausalLM:
        model = new_model(config, site, seed=12)
        shake(model, 12)
        return model

    batch, settings = (
        random_batch(config, batch=3, seq=7, seed=12),
        Settings(default_tolerance("float64", is_exact=False)),
    )

    def checked(group: Group) -> Report:
        return verify(make_site(group, dtype="float64"), make, batch, settings)

    with fault.planted():
        report = run_threads(ranks, checked)[0]
    for kind, place in fault.seen.items():
        first = report.first(kind)
        assert first is not None and first.name == place, kind
    assert fault.mistake in choices(number) and len(set(choices(number))) == 3


@pytest.mark.slow
@pytest.mark.parametrize("number", [4, 9, 10])
def test_right_answer_to_example_12_is_told(number: int) -> None:
    fault = FAULTS[COURSE[number - 1]]
    answer = [next(iter(fault.seen.values())), "abc"[choices(number).index(fault.mistake)]]
    done = run([sys.executable, str(EXAMPLES / "12_what_breaks.py"), str(number), *answer])
    assert done.stdout.endswith("\nThe layer is right, the mistake right.\n"), done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("words", [["0"], ["13"], ["x"], ["3", "loss"]])
def test_wrong_use_of_example_12_is_told(words: list[str]) -> None:
    done = run([sys.executable, str(EXAMPLES / "12_what_breaks.py"), *words])
    assert done.returncode == 1 and done.stderr.startswith("usage: ")


def test_a_reader_who_leaves_gets_no_traceback() -> None:
    script = EXAMPLES / "01_four_ways_to_cut_a_product.py"
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read().decode()
    assert "Traceback" not in said, said


def test_every_example_ends_tidily_at_ctrl_c() -> None:
    """Those that start no ranks by `on_ranks`, which does it, ask for it."""
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        words = ("on_ranks(", "tidy_ctrl_c()", "except KeyboardInterrupt")
        assert "__main__" not in text or any(word in text for word in words), path.name


@pytest.mark.parametrize(
    ("words", "first"),
    [(["12_what_breaks.py"], "PROOF"), (["check.py", "03"], "03"), (["your_own_all_reduce.py"], "1 rank")],
    ids=["ranks work", "at a question", "one's own code"],
)
def test_ctrl_c_gives_a_line_and_no_traceback(words: list[str], first: str) -> None:
    """The one Ctrl-C ends all ranks, which are threads."""
    command = [sys.executable, str(EXAMPLES / words[0]), *words[1:]]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PMI", "OMPI_COMM", "COVERAGE"))}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=env | {"PYTHONUNBUFFERED": "1"}, **pipes) as child:
        assert child.stdout is not None and child.stdout.readline().startswith(first)
        child.send_signal(signal.SIGINT)
        _, said = child.communicate(timeout=SECONDS)
    assert said == "\nstopped by Ctrl-C\n" and child.returncode in (INTERRUPTED, -signal.SIGINT)
