"""README and docs: links lead somewhere, pages are reached, commands are such as mpitp takes, the first job runs."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest

from mpitp.cli import _read as read_words
from mpitp.cli import main
from mpitp.launch.command import launched_words
from mpitp.run_file import load_run_config

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "BENCHMARKS.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "examples" / "README.md",
]


def without_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)


def anchors(path: Path) -> set[str]:
    """Of its headings, as both a forge and a site make them."""
    found = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in found}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", without_code(path.read_text(encoding="utf-8")))
    for link in links:
        if link.startswith("http"):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), f"{link}: no such file"
        assert target.is_relative_to(ROOT) and target.is_file(), f"{link}: name a file"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{link}: no such heading"


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\]\((\w+\.md)\)", index))
    assert named == {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}


def test_the_site_has_every_page_and_every_file_that_is_linked(tmp_path: Path) -> None:
    maker = runpy.run_path(str(ROOT / "scripts" / "stage_docs.py"))
    maker["stage"](tmp_path)
    menu = re.findall(r"^  - .*: (\S+\.md)$", (ROOT / "docs" / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(tmp_path / page for page in menu) == sorted(tmp_path.rglob("*.md"))
    for page in menu:
        for link in re.findall(r"\]\(([^)\s#]+)", without_code((tmp_path / page).read_text(encoding="utf-8"))):
            assert link.startswith("http") or ((tmp_path / page).parent / link).is_file(), f"{page}: {link}"


def test_readme_stays_short() -> None:
    """What a verb does stands in docs."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 140


def code_of(path: Path) -> list[str]:
    """The lines of code blocks, fenced and indented; what a backslash continues is one line."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    fenced = re.findall(r"```(?:sh|text)?\n(.*?)```", text, re.DOTALL)
    return [line.strip() for block in fenced for line in block.splitlines()] + re.findall(r"^    (\S.*)$", text, re.M)


def commands_of(path: Path) -> list[str]:
    """Calls of mpitp without what stands before and behind them: a launcher, a pipe, a comment."""
    found = []
    for line in code_of(path):
        call = re.search(r"(?:^|[|] |-n \d+ )(mpitp [a-z].*)", line)
        if call and "..." not in call[1]:
            found.append(re.split(r" [|<>] | \(\.\.\.|  +#|\s+#\s", call[1])[0].strip())
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_are_such_as_mpitp_takes(path: Path) -> None:
    for command in commands_of(path):
        words = shlex.split(command)[1:]
        call = read_words(words)
        assert call is not None
        verb, _, args = call
        inner = launched_words(args) if verb == "launch" else []
        if inner and not inner[0].endswith(".py"):
            assert read_words(inner) is not None, command


def test_commands_are_found_and_mistakes_seen() -> None:
    assert len(commands_of(ROOT / "docs" / "train.md")) >= 3 and len(commands_of(ROOT / "docs" / "use.md")) >= 10
    for wrong in (["train", "run.toml", "--steps", "3"], ["lunch", "-n", "2"]):
        with pytest.raises(Exception, match=r"--steps|lunch"):
            read_words(wrong)


def test_the_first_job_is_one_that_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## A first SLURM job")[2]
    run_file = re.search(r"<<'END'\n(.*?)END\n", text, re.DOTALL)
    assert run_file is not None
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(run_file[1])
    Path("book.txt").write_text("A text to learn from. " * 2000)
    for line in re.findall(r"^(mpitp (?:data|plan) .*)$", text, re.MULTILINE):
        assert main(shlex.split(line)[1:]) == 0
    assert "rank" in capsys.readouterr().out
    small = ["train.steps=1", "data.seq_len=16", "train.micro_batch_size=1", "train.global_batch_size=1"]
    small += ["model.hidden_size=16", "model.intermediate_size=8", "data.valid_sequences=1"]
    assert main(["train", "run.toml", *(word for key in small for word in ("--set", key))]) == 0
    assert load_run_config("run.toml").train.run_dir == "runs/first"
    for made in ("model/config.json", "metrics.jsonl", "checkpoints"):
        assert Path("runs/first", made).exists()
    submitted = re.search(r"^sbatch .* (scripts/slurm/\S+) run.toml$", text, re.MULTILINE)
    assert submitted and (ROOT / submitted[1]).is_file()
    assert len(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)[0].splitlines()) <= 10
