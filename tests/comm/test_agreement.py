"""Ranks that were not started alike find out before anything else happens, and say what differs."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pytest

from mpitp.comm import Group, SerialGroup, run_threads
from mpitp.comm.agreement import agree, call_facts, environment_facts, file_fact, folder_facts
from mpitp.errors import ConfigError


def message_of(facts: list[dict[str, Any]]) -> str | None:
    """What all ranks say, each of which has its own facts; None: they agree."""

    def rank(group: Group) -> str | None:
        try:
            agree(group, lambda: facts[group.rank])
        except ConfigError as error:
            return str(error)
        return None

    (message,) = set(run_threads(len(facts), rank))
    return message


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_equal_facts(ranks: int) -> None:
    assert message_of([{"a": 1, "b": [1.5, None], "c": "x" * 1000}] * ranks) is None
    assert message_of([{"a": 1, "b": 2}, {"b": 2, "a": 1}] * ranks) is None


def test_one_rank_is_not_asked() -> None:
    agree(SerialGroup(), lambda: pytest.fail("asked"))


DIFFERENT: list[tuple[list[dict[str, Any]], str]] = [
    ([{"a": 1, "b": 2}, {"a": 1, "b": 3}], "alike: b is 2 on rank 0, 3 on rank 1. "),
    ([{"a": 0.1}, {"a": 0.1}, {"a": 0.1}, {"a": 1}], "alike: a is 0.1 on ranks 0, 1, 2, 1 on rank 3. "),
    ([{"a": 1}, {}], "alike: a is 1 on rank 0, not there on rank 1. "),
    ([{"a": None}, {"a": "x"}], "alike: a is not given on rank 0, x on rank 1. "),
    ([{"the verb": "train", "a": 1}, {"the verb": "verify"}], "alike: the verb is train on rank 0, verify on rank 1. "),
    ([dict.fromkeys("abcdefg", 1), dict.fromkeys("abcdefg", 2)], "e is 1 on rank 0, 2 on rank 1; and 2 more. "),
    ([{"a": "é" * 300 + "x"}, {"a": "é" * 300 + "y"}], "alike: a is éé"),
    ([{"a": 1}] * 12 + [{"a": 2}], "1 on ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more, 2 on rank 12. "),
]


@pytest.mark.parametrize(("facts", "words"), DIFFERENT)
def test_what_differs_is_told_once_and_alike(facts: list[dict[str, Any]], words: str) -> None:
    message = message_of(facts)
    assert message is not None and words in message and len(message) < 1200


def test_hosts_are_told_when_there_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    names = threading.local()
    monkeypatch.setattr("mpitp.comm.agreement.socket.gethostname", lambda: names.own)

    def rank(group: Group) -> str:
        names.own = f"n{group.rank // 2}"
        with pytest.raises(ConfigError) as caught:
            agree(group, lambda: {"a": group.rank == 2})
        return str(caught.value)

    assert "a is false on ranks 0, 1, 3 (n0, n1), true on rank 2 (n1). " in run_threads(4, rank)[0]


def test_environment_names_what_changes_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPITP_ACCELERATOR", "off")
    facts = environment_facts()
    assert [key for key, value in facts.items() if value == "none"] == [
        "the accelerator (MPITP_ACCELERATOR=off leaves it out)"
    ]
    assert {"the version of mpitp", "the version of Python", "the version of NumPy"} < set(facts)


def test_arguments() -> None:
    args = argparse.Namespace(model="x", top_k=3, prompt=["a"])
    assert call_facts("generate", args, ["model"]) == {"the verb": "generate", "--prompt": ["a"], "--top-k": 3}


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 64 * 4096, 64 * 4096 + 1, 3_000_000])
def test_file_fact_sees_length_and_content(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(size))
    facts = {file_fact(path)}
    assert facts.pop().startswith(f"{size} bytes, ")
    for place in {0, size - 1} if size else ():
        changed = bytearray(size)
        changed[place] = 1
        path.write_bytes(changed)
        facts.add(file_fact(path))
    assert len(facts) == len({0, size - 1} if size else ())


def test_every_byte_of_a_small_file_counts(tmp_path: Path) -> None:
    path = tmp_path / "file"
    found = set()
    for place in range(0, 9000, 37):
        content = bytearray(9000)
        content[place] = 1
        path.write_bytes(content)
        found.add(file_fact(path))
    assert len(found) == len(range(0, 9000, 37))


def test_what_is_no_file_is_a_fact_too(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert file_fact(tmp_path / "nothing") == "not there"
    assert file_fact(tmp_path / "pipe") == file_fact(tmp_path) == "no regular file"
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "b.bin").write_text("{}")
    assert list(folder_facts("--model", tmp_path, ("*.json", "*.txt"))) == ["a.json of --model"]
    assert folder_facts("--model", tmp_path / "nothing", ("*",)) == {"--model": "not there"}
    assert folder_facts("--model", None, ("*",)) == {"--model": "none"}
