"""Whether all ranks were started alike: the same arguments, files and versions, compared before anything else happens.

Ranks that differ would train a mixed model, print nonsense or wait for ever in collectives that don't fit together. It
happens where a run file or a model lies on disks of the nodes' own, or is edited while a job starts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpitp import __version__
from mpitp.backend.accelerator import offer
from mpitp.comm.group import Group
from mpitp.errors import ConfigError

Facts = dict[str, Any]  # what a rank goes by, under the name that users know it by; small values
MOST_TOLD = 5  # differences in one message
PIECES, PIECE_BYTES = 64, 4096  # of a large file that are looked at
ABSENT = "not there"
VERB = "the verb"


def agree(group: Group, facts: Callable[[], Facts]) -> None:
    """Raise ConfigError on all ranks, naming keys, values and ranks, where `facts()` differs between any of them.

    A collective over `group`; a single rank isn't asked for its facts. `facts` must not raise for what one rank alone
    may lack (`file_fact`).
    """
    if group.size == 1:
        return
    own = {key: _shown(value) for key, value in facts().items()}
    digest = hashlib.sha256(repr(sorted(own.items())).encode()).hexdigest()
    if len(set(group.all_gather_objects(digest))) > 1:
        told = group.all_gather_objects((socket.gethostname(), own))
        raise ConfigError(_difference([host for host, _ in told], [rank_s for _, rank_s in told]))


def environment_facts() -> Facts:
    """What changes the numbers beside what a user asks for."""
    from importlib import metadata

    return {
        "the version of mpitp": __version__,
        "the version of Python": platform.python_version(),
        "the version of NumPy": metadata.version("numpy"),
        "the accelerator (MPITP_ACCELERATOR=off leaves it out)": offer() or "none",
    }


def call_facts(verb: str, args: argparse.Namespace, leave_out: Collection[str] = ()) -> Facts:
    """A verb and its arguments as they were understood, but for those that are told in another way."""
    own = {f"--{name.replace('_', '-')}": value for name, value in sorted(vars(args).items()) if name not in leave_out}
    return {VERB: verb} | own


def file_fact(path: Path) -> str:
    """What a file holds, in short: all bytes of a small one count, pieces from everywhere in a large one."""
    try:
        size = path.stat().st_size
        if not path.is_file():
            return "no regular file"
        found = hashlib.sha256()
        with open(path, "rb", buffering=0) as file:
            for start in _starts(size):
                file.seek(start)
                found.update(file.read(PIECE_BYTES))
    except OSError as error:
        return ABSENT if isinstance(error, FileNotFoundError | NotADirectoryError) else f"unreadable ({error.strerror})"
    return f"{size} bytes, {found.hexdigest()[:12]}"


def folder_facts(label: str, folder: Path | None, patterns: Sequence[str]) -> dict[str, str]:
    """What each file of a folder holds whose name fits; `label` is what users call the folder."""
    if folder is None or not folder.is_dir():
        return {label: "none" if folder is None else file_fact(folder)}
    paths = sorted({path for pattern in patterns for path in folder.glob(pattern)})
    return {f"{path.name} of {label}": file_fact(path) for path in paths}


def _starts(size: int) -> Sequence[int]:
    if size <= PIECES * PIECE_BYTES:
        return range(0, size, PIECE_BYTES)
    return [index * (size - PIECE_BYTES) // (PIECES - 1) for index in range(PIECES)]


def _shown(value: Any) -> str:
    if value is None:
        return "not given"
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 200 else f"{text[:100]}... ({hashlib.sha256(text.encode()).hexdigest()[:12]})"


def _difference(hosts: Sequence[str], facts: Sequence[Mapping[str, str]]) -> str:
    """The message: which keys differ, and who has what."""
    keys = list(dict.fromkeys(key for own in facts for key in own))
    differing = [key for key in keys if len({own.get(key) for own in facts}) > 1]
    differing = [VERB] if VERB in differing else differing  # of which all else follows
    lines = [f"{key} is {_who_has_what(key, hosts, facts)}" for key in differing[:MOST_TOLD]]
    more = f"; and {len(differing) - MOST_TOLD} more" if len(differing) > MOST_TOLD else ""
    return (
        f"the ranks were not started alike: {'; '.join(lines)}{more}. All need the same arguments, files and versions; "
        "was a file edited while the job started, or does it lie on disks of the nodes' own?"
    )


def _who_has_what(key: str, hosts: Sequence[str], facts: Sequence[Mapping[str, str]]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, own in enumerate(facts):
        ranks.setdefault(own.get(key, ABSENT), []).append(rank)
    return ", ".join(f"{value} on {_ranks(numbers, hosts)}" for value, numbers in ranks.items())


def _ranks(numbers: Sequence[int], hosts: Sequence[str]) -> str:
    names = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    places = sorted({hosts[rank] for rank in numbers})
    place = f" ({', '.join(places[:3])}{', ...' if len(places) > 3 else ''})" if len(set(hosts)) > 1 else ""
    return f"rank{'s' if len(numbers) > 1 else ''} {names}{place}"
