"""Damaged files of arrays and of images are told as such, whatever NumPy or zipfile raise there."""

from __future__ import annotations

import gzip
import io
import random
import struct
from pathlib import Path

import numpy as np
import pytest

from mpitp.data.images import open_images
from mpitp.data.npz import read_npz
from mpitp.errors import FileError
from mpitp.verify.reference import read_reference

PIXELS, LABELS = np.arange(6 * 16, dtype=np.uint8).reshape(6, 4, 4), np.arange(6) % 2


def npz(compressed: bool = False) -> bytes:
    file = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(file, images=PIXELS, labels=LABELS)
    return file.getvalue()


def single() -> bytes:
    file = io.BytesIO()
    np.save(file, PIXELS)
    return file.getvalue()


def flipped() -> bytes:
    """One byte of the images is another: their checksum says so."""
    content = bytearray(npz())
    content[content.index(PIXELS.tobytes()) + 5] ^= 1
    return bytes(content)


@pytest.mark.parametrize(
    ("content", "words"),
    [(npz()[:-40], "zip"), (flipped(), "CRC"), (single(), "single array"), (b"", "No data")],
    ids=["cut short", "changed", "one array", "empty"],
)
def test_a_damaged_archive_is_told(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "set.npz"
    path.write_bytes(content)
    for read in (lambda: open_images(path, 1), lambda: read_reference(path)):
        with pytest.raises(FileError, match=words) as found:
            read()
        assert str(path) in str(found.value)


def test_an_archive_comes_back() -> None:
    np.testing.assert_array_equal(read_npz(io.BytesIO(npz()))["labels"], LABELS)
    assert list(read_npz(io.BytesIO(npz()), ["images"])) == ["images"]


@pytest.mark.parametrize("kind", ["plain", "compressed", "idx"])
def test_random_damage_is_an_error_of_the_file_or_none(kind: str, tmp_path: Path) -> None:
    chance = random.Random(kind)
    path = tmp_path / ("set-images-idx3-ubyte.gz" if kind == "idx" else "set.npz")
    (tmp_path / "set-labels-idx1-ubyte.gz").write_bytes(struct.pack(">4BI", 0, 0, 8, 1, 6) + bytes(6))
    whole = npz(kind == "compressed")
    if kind == "idx":
        whole = gzip.compress(struct.pack(">4B3I", 0, 0, 8, 3, *PIXELS.shape) + PIXELS.tobytes())
    refused = 0
    for _ in range(200):
        content = bytearray(whole[: chance.choice((len(whole), chance.randrange(1, len(whole))))])
        for _ in range(chance.randrange(4)):
            content[chance.randrange(len(content))] = chance.randrange(256)
        path.write_bytes(content)
        try:
            open_images(path, 1)
        except FileError as error:
            refused += str(path) in str(error)
    assert refused > 100
