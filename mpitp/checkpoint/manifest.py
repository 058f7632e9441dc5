"""The manifest of a checkpoint: size and checksums of each file, by which a damaged checkpoint is known.

A checksum (CRC-32) covers one chunk of a file, so that the ranks can share the sums of a large one. The ranks sum what
they write while they write it (`chunk_sums.py`); nothing is read back.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from mpitp.checkpoint.chunk_sums import ChunkSums, Sums, join
from mpitp.checkpoint.safetensors_header import read_header_bytes
from mpitp.errors import FileError
from mpitp.files import os_failure, read_json

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state.json"
CHUNK_BYTES = 1 << 26  # what one checksum covers
READ_BYTES = 1 << 20


def sums_of_chunks(size: int, pool: Executor | None = None) -> ChunkSums:
    """What sums the chunks of a file of `size` bytes while pieces of it are written."""
    return ChunkSums(size, CHUNK_BYTES, pool)


def make_manifest(staging: Path, sizes: Mapping[str, int], shares: Mapping[str, Sequence[Sums]]) -> dict[str, Any]:
    """The manifest's content; files that no rank has summed while writing (the small ones) are read."""
    files = {}
    for name, size in sorted(sizes.items()):
        if shares[name]:
            header = sums_of_chunks(size)
            header.add(0, memoryview(read_header_bytes(staging / name)))
            sums = join([header.sums(), *shares[name]], size, CHUNK_BYTES)
        else:
            sums = [_crc(staging / name, chunk) for chunk in range(_num_chunks(size))]
        files[name] = {"bytes": size, "crc32": sums}
    return {"format": FORMAT, "chunk_bytes": CHUNK_BYTES, "files": files}


def checksums(directory: Path, sizes: Mapping[str, int], rank: int, ranks: int) -> dict[str, dict[int, int]]:
    """CRC-32 of this rank's share of the chunks of these files: {file: {chunk: sum}}."""
    everything = [(name, chunk) for name, size in sorted(sizes.items()) for chunk in range(_num_chunks(size))]
    sums: dict[str, dict[int, int]] = {}
    for name, chunk in everything[rank::ranks]:
        sums.setdefault(name, {})[chunk] = _crc(directory / name, chunk)
    return sums


def damage(path: Path, rank: int, ranks: int) -> str | None:
    """What is wrong with a checkpoint, as far as this rank's share of the chunks tells; None: nothing."""
    if not (path / MANIFEST).is_file():
        return f"it has no {MANIFEST}" if path.exists() else "it doesn't exist"
    files = _read_manifest(path / MANIFEST)
    for name, (size, _) in files.items():
        if not (path / name).is_file():
            return f"{name} is missing"
        found = (path / name).stat().st_size
        if found != size:
            return f"{name} has {found} bytes, its {MANIFEST} says {size}"
    for name, chunks in checksums(path, {name: size for name, (size, _) in files.items()}, rank, ranks).items():
        if any(files[name][1][chunk] != value for chunk, value in chunks.items()):
            return f"{name} doesn't match its checksum"
    return None


def _read_manifest(path: Path) -> dict[str, tuple[int, list[int]]]:
    """Size and sums of each file. Raises FileError for anything that no save has written."""
    raw = read_json(path)
    check_format(path, raw.get("format"))
    try:
        files = {name: (entry["bytes"], entry["crc32"]) for name, entry in raw["files"].items()}
        is_sound = raw["chunk_bytes"] == CHUNK_BYTES and STATE in files
        is_sound &= all(len(sums) == _num_chunks(size) and not _leaves(name) for name, (size, sums) in files.items())
    except (KeyError, TypeError, AttributeError):
        is_sound = False
    if not is_sound:
        raise FileError(f"{path} is garbled: it isn't as it was written")
    return files


def _leaves(name: str) -> bool:
    """Whether a name leads out of its directory."""
    return Path(name).is_absolute() or ".." in Path(name).parts


def check_format(path: Path, found: Any) -> None:
    """Raise FileError for a file of another format than this version's."""
    if found != FORMAT:
        raise FileError(
            f"{path}: format {found!r} is not the one that this version reads ({FORMAT}); "
            "use the version of mpitp that wrote it"
        )


def refuse_newer_format(path: Path) -> None:
    """Raise FileError for a checkpoint that a newer version has written: it isn't damaged."""
    for name in (MANIFEST, STATE):
        try:
            found = read_json(path / name).get("format")
        except FileError:
            continue  # damage, which is another matter
        if type(found) is int and found > FORMAT:
            check_format(path / name, found)


def _num_chunks(size: int) -> int:
    return max(1, -(-size // CHUNK_BYTES))


def _crc(path: Path, chunk: int) -> int:
    value, left = 0, CHUNK_BYTES
    buffer = memoryview(bytearray(READ_BYTES))
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(chunk * CHUNK_BYTES)
            while left and (count := file.readinto(buffer[: min(left, READ_BYTES)])):
                value = zlib.crc32(buffer[:count], value)
                left -= count
    except OSError as error:
        raise os_failure("read", path, error) from error
    return value
