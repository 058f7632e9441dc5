"""The safetensors format: what the reference library writes is read, what is written it reads, damage is named."""

import json
import time

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from mpitp.checkpoint import safetensors_file
from mpitp.checkpoint.safetensors_file import SafetensorsFile, SafetensorsWriter, create_file
from mpitp.checkpoint.safetensors_header import plan_file
from mpitp.errors import FileError


def numbers(*shape, dtype=np.float32):
    return np.random.default_rng(7).standard_normal(shape).astype(dtype)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


@pytest.fixture
def narrow_bands(monkeypatch):
    """Tiny scratch memory and pages, so that small tensors take every way through the code."""
    monkeypatch.setattr(safetensors_file, "BAND_BYTES", 48)
    monkeypatch.setattr(safetensors_file, "PAGE_BYTES", 24)


def read(path, name, shape, dim=0, start=0, dtype=np.float32):
    out = np.full(shape, np.nan, dtype)
    with SafetensorsFile(path) as file:
        file.read(name, out, starts(len(shape), dim, start))
    return out


def starts(ndim, dim, start):
    """Where a box begins that is cut along one dim."""
    return [start if each == dim else 0 for each in range(ndim)]


@pytest.mark.parametrize("stored", [np.float32, np.float16, np.float64, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("dim", "start", "size"), [(0, 0, 7), (0, 2, 3), (1, 0, 11), (1, 3, 5), (1, 0, 9), (0, 5, 0)])
@pytest.mark.usefixtures("narrow_bands")
def test_slices_of_what_the_reference_library_wrote(path, stored, dtype, dim, start, size):
    matrix = numbers(7, 11, dtype=stored)
    safetensors.numpy.save_file({"a": numbers(5), "w": matrix}, path)
    rows = [slice(None), slice(None)]
    rows[dim] = slice(start, start + size)
    expected = matrix[tuple(rows)].astype(dtype)
    np.testing.assert_array_equal(read(path, "w", expected.shape, dim, start, dtype), expected)
    transposed = np.full(expected.T.shape, np.nan, dtype)
    with SafetensorsFile(path) as file:
        file.read("w", transposed.T, starts(2, dim, start))
    np.testing.assert_array_equal(transposed, expected.T)


@pytest.mark.usefixtures("narrow_bands")
def test_tensors_of_any_rank(path):
    tensors = {"scalar": numbers().reshape(()), "vector": numbers(40), "cube": numbers(3, 4, 5), "none": numbers(0, 3)}
    safetensors.numpy.save_file(tensors, path)
    np.testing.assert_array_equal(read(path, "scalar", ()), tensors["scalar"])
    np.testing.assert_array_equal(read(path, "vector", (30,), 0, 7), tensors["vector"][7:37])
    np.testing.assert_array_equal(read(path, "none", (0, 3)), tensors["none"])
    for dim, rows in ((0, np.s_[1:3]), (1, np.s_[:, 1:3]), (2, np.s_[:, :, 1:3])):
        expected = tensors["cube"][rows]
        np.testing.assert_array_equal(read(path, "cube", expected.shape, dim, 1), expected)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16", "F64"])
@pytest.mark.usefixtures("narrow_bands")
def test_what_is_written_in_slices_the_library_reads(path, dtype):
    matrix, vector = numbers(9, 10), numbers(13)
    layout = plan_file({"w": (dtype, (9, 10)), "t": (dtype, (10, 9)), "v": (dtype, (13,))})
    create_file(path, layout)
    writer = SafetensorsWriter(path, layout)
    for start, stop in ((0, 4), (4, 9)):
        writer.write("w", matrix[start:stop], (start, 0))
        writer.write("t", matrix[start:stop].T, (0, start))
    writer.write("v", vector[:6], (0,))
    writer.write("v", vector[6:], (6,))
    writer.close()
    stored = safetensors_file.FLOAT_DTYPES[dtype]
    with safetensors.safe_open(path, "numpy") as file:
        assert file.metadata() == {"format": "pt"}
        assert {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()} == {  # noqa: SIM118
            "t": (10, 9),
            "v": (13,),
            "w": (9, 10),
        }
        if dtype != "BF16":
            np.testing.assert_array_equal(file.get_tensor("t"), matrix.T.astype(stored))
    np.testing.assert_array_equal(read(path, "w", (9, 10)), matrix.astype(stored).astype(np.float32))
    np.testing.assert_array_equal(read(path, "v", (13,)), vector.astype(stored).astype(np.float32))


def test_the_layout_is_what_the_library_writes(path):
    tensors = {"b": numbers(2, 3), "a.x": numbers(5)}
    theirs = safetensors.numpy.save(tensors, metadata={"format": "pt"})
    layout = plan_file({name: ("F32", array.shape) for name, array in tensors.items()})
    create_file(path, layout)
    writer = SafetensorsWriter(path, layout)
    for name, array in tensors.items():
        writer.write(name, array)
    writer.close()
    assert path.read_bytes() == theirs


def test_a_value_beyond_float16_is_refused(path):
    layout = plan_file({"w": ("F16", (2,))})
    create_file(path, layout)
    writer = SafetensorsWriter(path, layout)
    with pytest.raises(FileError, match="beyond what float16 holds"):
        writer.write("w", np.array([1.0, 1e5], np.float32))
    writer.close()


def test_integers_are_no_weights(path):
    safetensors.numpy.save_file({"ids": np.arange(4)}, path)
    with pytest.raises(FileError, match="stored as I64"):
        read(path, "ids", (4,))


def with_header(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(begin, end, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


DAMAGED = {
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "git-lfs pointer"),
    "empty": (b"", "it has 0 bytes"),
    "short": (b"1234", "it has 4 bytes"),
    "huge": (with_header(b"{}", length=2**60), f"claim a header of {2**60} bytes, the limit is 100000000"),
    "cut header": (with_header({"w": entry(0, 8)})[:20], "is truncated: its header should have"),
    "no json": (with_header(b"{nonsense}"), "not JSON"),
    "latin": (with_header(b'{"\xe9": 1}'), "not JSON"),
    "deep": (with_header(b'{"a":' + b"[" * 100_000), "not JSON"),
    "list": (with_header(b"[1]"), "must begin with {"),
    "space first": (with_header(b" {}"), "must begin with {"),
    "repeated": (with_header(b'{"w": 1, "w": 2}'), "names w twice"),
    "metadata": (with_header({"__metadata__": {"a": 1}}), "must map names to strings"),
    "cut data": (with_header({"w": entry(0, 8)}, b"1234"), "is truncated: its tensors take 8 bytes, the file holds 4"),
    "more data": (with_header({"w": entry(0, 8)}, b"1" * 9), "bytes that belong to no tensor"),
    "gap": (
        with_header({"w": entry(0, 8), "x": entry(12, 20)}, b"1" * 20),
        "x begins at byte 12 of the data, expected 8",
    ),
    "overlap": (with_header({"w": entry(0, 8), "x": entry(4, 12)}, b"1" * 12), "x begins at byte 4"),
    "size": (with_header({"w": entry(0, 8, (3,))}, b"1" * 8), "needs 12 bytes"),
    "dtype": (with_header({"w": entry(0, 8, dtype="Q4")}, b"1" * 8), "unknown dtype 'Q4'"),
    "negative": (with_header({"w": entry(0, 8, (-1, -2))}, b"1" * 8), "whole numbers, not below 0"),
    "fraction": (with_header({"w": entry(0, 8.0)}, b"1" * 8), "whole numbers, not below 0"),
    "keys": (with_header({"w": {"dtype": "F32", "shape": []}}), "must have dtype, shape and data_offsets"),
    "dtype list": (with_header({"w": entry(0, 8, dtype=["F32"])}, b"1" * 8), "unknown dtype"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damage_is_named(path, damage):
    content, words = DAMAGED[damage]
    path.write_bytes(content)
    with pytest.raises(FileError) as caught:
        SafetensorsFile(path)
    assert words in str(caught.value) and str(path) in str(caught.value)
    assert caught.value.exit_code == 4


def test_a_file_that_is_not_there(path, tmp_path):
    with pytest.raises(FileError, match=r"can't read .*model.safetensors: No such file"):
        SafetensorsFile(path)
    with pytest.raises(FileError, match="Is a directory"):
        SafetensorsFile(tmp_path)


def test_a_file_that_shrinks_while_open(path):
    safetensors.numpy.save_file({"w": numbers(100)}, path)
    with SafetensorsFile(path) as file:
        with open(path, "r+b") as other:
            other.truncate(200)
        with pytest.raises(FileError, match="became shorter"):
            file.read("w", np.empty(100, np.float32))


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"w": entry(0, 8, [int("9" * 4000)])}, "lists of whole numbers, not below 0 or above 2"),
        ({"w": entry(0, int("9" * 4000))}, "lists of whole numbers"),
        ({"w": entry(0, 8, [2**62] * 64)}, "needs"),
        ({"w": entry(0, 8, [1] * 65)}, "at most 64 dims"),
        (b'{"w": ' + b"[" * 100_000, "not JSON"),
        (b'{"w": ' + b"9" * 100_000 + b"}", "not JSON"),
        (b"{" + b",".join(b'"t%d": 0' % i for i in range(60_000)) + b', "t59999": 0}', "names t59999 twice"),
    ],
    ids=range(7),
)
def test_hostile_headers_are_refused_at_once(path, header, words):
    path.write_bytes(with_header(header, b"\0" * 8))
    started = time.process_time()
    with pytest.raises(FileError, match=words):
        SafetensorsFile(path)
    assert time.process_time() - started < 5  # names compared each with each took minutes
