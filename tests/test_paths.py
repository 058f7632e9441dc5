"""`~` and `$NAME` in paths: in run files, in --set and in every option that names a file or a directory."""

from __future__ import annotations

import argparse
import os
import pwd
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from mpitp import cli
from mpitp.errors import ConfigError
from mpitp.paths import expand_path, input_path, path_option
from mpitp.run_file import load_run_config

ENVIRON = {"HOME": "/home/ada", "SCRATCH": "/scratch/ada", "RUN_7": "seven", "NOTHING": ""}


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("~", "/home/ada"),
        ("~/runs", "/home/ada/runs"),
        ("$SCRATCH/runs", "/scratch/ada/runs"),
        ("${SCRATCH}-2/$RUN_7.d", "/scratch/ada-2/seven.d"),
        ("~/$RUN_7", "/home/ada/seven"),
        ("./~/runs", "./~/runs"),
        ("runs/a~b", "runs/a~b"),
        ("US$100/$", "US$100/$"),
        ("a$$SCRATCH", "a$SCRATCH"),
        ("runs/näme with spaces", "runs/näme with spaces"),
        ("~root/x", pwd.getpwnam("root").pw_dir + "/x"),
    ],
)
def test_what_is_written_and_what_is_meant(written: str, meant: str) -> None:
    assert expand_path(written, ENVIRON) == meant


@pytest.mark.parametrize(
    ("written", "rule"),
    [
        ("$WHERE/runs", "WHERE is not set"),
        ("${WHERE}", "WHERE is not set"),
        ("$NOTHING/runs", "NOTHING is empty"),
        ("~nobody-of-this-name/x", "there is no user nobody-of-this-name"),
    ],
)
def test_what_stands_for_nothing_is_an_error(written: str, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        expand_path(written, ENVIRON)


def test_a_file_that_a_shell_has_named_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in $ROUBLES.txt").write_text("x")
    assert input_path("in $ROUBLES.txt") == "in $ROUBLES.txt"
    with pytest.raises(argparse.ArgumentTypeError, match="ROUBLES is not set"):
        input_path("out $ROUBLES.txt")


RUN = """
[model]
from = "~/models/tiny"
[data]
train = "$SCRATCH/data"
valid = "$SCRATCH/valid"
seq_len = 8
[train]
steps = 1
run_dir = "{}"
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SCRATCH", "/scratch")
    monkeypatch.delenv("WHERE", raising=False)
    return tmp_path


def test_run_files_and_overrides(home: Path) -> None:
    (home / "run.toml").write_text(RUN.format("runs/~"))
    run = load_run_config(home / "run.toml", ["data.valid=~/v"])
    assert run.model.from_ == f"{home}/models/tiny" and run.data.train == "/scratch/data"
    assert run.data.valid == f"{home}/v" and run.train.run_dir == "runs/~"


@pytest.mark.parametrize("override", ["", "train.run_dir=$WHERE/x"])
def test_an_unset_name_in_a_run_file_names_its_key(home: Path, override: str) -> None:
    (home / "run.toml").write_text(RUN.format("x" if override else "$WHERE/x"))
    with pytest.raises(ConfigError, match=r'train.run_dir = "\$WHERE/x": the variable WHERE is not set'):
        load_run_config(home / "run.toml", [override] if override else [])


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for verb, (module, _) in cli.VERBS.items():
        parser = argparse.ArgumentParser(verb)
        import_module(module).add_arguments(parser)
        yield verb, parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield from ((f"{verb} {name}", sub) for name, sub in action.choices.items())


def test_every_option_that_is_a_path_is_expanded() -> None:
    seen = 0
    for verb, parser in parsers():
        for action in parser._actions:
            words = str(action.metavar)
            if any(mark in words for mark in ("DIR", "FILE", ".TOML", ".JSON", ".HTML", ".gguf", "PYTHON")):
                assert action.type in (path_option, input_path), f"{verb}: {action.dest}"
                seen += 1
    assert seen >= 20


def test_no_folder_called_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    (home / "text.txt").write_text("some text " * 20)
    assert cli.main(["data", "prepare", "$HOME/text.txt", "--tokenizer", "bytes", "--out=~/made"]) == 0
    assert cli.main(["data", "prepare", "~/text.txt", "--tokenizer", "bytes", "--out", "$WHERE/made"]) == 2
    assert sorted(os.listdir(home)) == ["made", "text.txt"]
