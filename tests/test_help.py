"""What `--help` and the pages say: every verb and action teaches by commands that are such as mpitp takes, and options,
keys and files that pages name in passing are there.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from mpitp import cli
from mpitp.config import SECTIONS
from mpitp.launch.command import launched_words

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = sorted(path.name for path in (ROOT / "mpitp").iterdir() if path.is_dir())
KEYS = {name: {field.name.rstrip("_") for field in dataclasses.fields(cls)} for name, cls in SECTIONS.items()}
SECTION = rf"({'|'.join(KEYS)})"


def all_parsers() -> dict[tuple[str, ...], argparse.ArgumentParser]:
    """Of every verb, and of every action of those that have some."""
    found = {}
    for verb, (module, _) in cli.VERBS.items():
        parser = argparse.ArgumentParser(f"mpitp {verb}", formatter_class=argparse.RawDescriptionHelpFormatter)
        import_module(module).add_arguments(parser)
        found[verb,] = parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                found |= {(verb, name): inner for name, inner in action.choices.items()}
    return found


PARSERS = all_parsers()


def options(parser: argparse.ArgumentParser) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings}


def examples_of(parser: argparse.ArgumentParser) -> list[str]:
    """The commands in the text of a help, without what stands before and behind them."""
    text = f"{parser.description or ''}\n{parser.epilog or ''}"
    lines = re.findall(r"^ +(?:[^|\n]*[|] |\w+=\S+ |srun [-\w ]*|mpirun [-\w ]*)?(mpitp .*)$", text, re.MULTILINE)
    return [re.split(r"  +| # | > ", line)[0] for line in lines if "--help" not in line]


@pytest.mark.parametrize("name", PARSERS, ids=" ".join)
def test_every_help_says_what_it_does_by_commands_that_are_taken(name: tuple[str, ...]) -> None:
    parser = PARSERS[name]
    assert parser.description
    examples = examples_of(parser)
    assert examples or name[0] == "bench"  # whose examples stand together
    for example in examples:
        call = cli._read(shlex.split(example)[1:])
        assert call is not None
        inner = launched_words(call[2]) if call[0] == "launch" else []
        if inner and not inner[0].endswith(".py"):
            assert cli._read(inner) is not None, example


def test_examples_are_found() -> None:
    assert len(examples_of(PARSERS["launch",])) >= 7 and len(examples_of(PARSERS["step",])) >= 14
    assert "mpitp doctor" in examples_of(PARSERS["doctor",]) and len(examples_of(PARSERS["bench",])) >= 20


def code_in_passing(path: Path) -> list[str]:
    """Words in backticks within the text of a page."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL))


def slips(code: str) -> list[str]:
    """What a word in backticks names that there isn't: a verb, an option of it, a key of a run file, a file."""
    found = []
    if call := re.match(r"mpitp ([a-z]+)(?: ([a-z]+))?", code):
        own = [PARSERS[name] for name in ((call[1], call[2]), (call[1],)) if name in PARSERS]
        if call[1] == "plan":
            own.append(PARSERS["plan", "search"])  # what `mpitp plan RUN.toml` means
        taken = set().union(*map(options, own))
        given = [] if call[1] == "launch" else re.findall(r"(?<![\w-])--[a-z][a-z-]+", code)
        found += [word for word in given if word not in taken] if own else [code]
    named = re.findall(rf"\[{SECTION}\] ([a-z_]+)", code) + re.findall(
        rf"(?<![\w./]){SECTION}\.([a-z_]+)\b(?= *=)", code
    )
    found += [f"{section}.{key}" for section, key in named if key not in KEYS[section]]
    for name in re.findall(rf"(?<![\w/.])((?:scripts|examples|docs|tests|mpitp|{'|'.join(FOLDERS)})/[\w./-]+)", code):
        places = [ROOT / name, ROOT / "mpitp" / name]
        if "/" in name.rstrip("/") and re.search(r"\.\w+$", name) and not any(place.exists() for place in places):
            found.append(name)
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_pages_name_in_passing_is_there(path: Path) -> None:
    assert [slip for code in code_in_passing(path) for slip in slips(code)] == []


def test_slips_are_seen() -> None:
    for code in ("mpitp trian", "mpitp doctor --jsonn", "[mesh] dpp = 2", "`mesh.tpp = 2`", "layers/linaer.py"):
        assert len(slips(code)) == 1, code
    for code in ("mpitp plan RUN.toml --ranks N", "[mesh] dp = 2", "layers/linear.py", "mpitp launch -n 2 -- train x"):
        assert slips(code) == []
