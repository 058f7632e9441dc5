from __future__ import annotations

import os
from importlib import import_module
from types import SimpleNamespace

import pytest

from mpitp import __version__, cli
from mpitp.backend.threads import THREAD_VARIABLES
from mpitp.errors import ConfigError


def test_every_verb_has_a_module_that_runs() -> None:
    for name, (module, line) in cli.VERBS.items():
        found = import_module(module)
        assert callable(found.add_arguments) and callable(found.run), name
        assert line


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_verbs(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 0
    printed = capsys.readouterr().out
    assert all(f"\n  {verb} " in printed for verb in cli.VERBS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"mpitp {__version__}\n"


def test_unknown_verb_is_named_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trian"]) == 2
    assert capsys.readouterr().err == (
        "UsageError: mpitp has no verb 'trian'; did you mean train?; mpitp --help lists them\n"
    )


def test_a_hostile_word_of_any_length_leaves_a_readable_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "--model", "m", "x" * 100_000]) == 2
    said = capsys.readouterr().err
    assert said.startswith("UsageError: unrecognized arguments: xxx") and said.endswith("see mpitp generate --help\n")
    assert len(said) < 9000 and "x [... 9" in said and " letters ...] x" in said


def test_wrong_options_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--jason"]) == 2
    assert capsys.readouterr().err.startswith("UsageError: unrecognized arguments: --jason\n")


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A verb `try` whose `run` a test may set; the process keeps its allocator and thread settings."""
    module = SimpleNamespace(add_arguments=lambda parser: None, run=lambda args: 0)
    monkeypatch.setitem(cli.VERBS, "try", ("try_module", "a test"))
    monkeypatch.setattr(cli, "import_module", lambda name: module)
    monkeypatch.setattr(cli, "keep_blocks_in_heap", lambda: True)
    for name in THREAD_VARIABLES:
        monkeypatch.setenv(name, "1")
    return module


def test_exit_code_is_the_verb_s(verb: SimpleNamespace) -> None:
    verb.run = lambda args: 6
    assert cli.main(["try"]) == 6


def test_user_errors_are_one_message(verb: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    def run(args: object) -> int:
        raise ConfigError("optim.lr must be above 0")

    verb.run = run
    assert cli.main(["try"]) == 3
    assert capsys.readouterr().err == "ConfigError: optim.lr must be above 0\n"


def test_bugs_show_their_traceback(verb: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    def run(args: object) -> int:
        raise KeyError("x")

    verb.run = run
    assert cli.main(["try"]) == 1
    assert capsys.readouterr().err.startswith("Traceback")


def test_threads_are_set_before_the_verb_runs(verb: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name)
    seen = {}
    verb.run = lambda args: seen.update({name: os.environ.get(name) for name in THREAD_VARIABLES}) or 0
    cli.main(["try"])
    assert all(value is not None and int(value) >= 1 for value in seen.values())
    for name in THREAD_VARIABLES:  # what the command set; monkeypatch puts the earlier values back
        monkeypatch.delenv(name)
