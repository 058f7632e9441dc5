"""Directories are published whole or not at all."""

import pytest

from mpitp.errors import FileError
from mpitp.files import publishing, read_json, write_file, write_json


def test_published_at_the_end_only(tmp_path):
    target = tmp_path / "deep" / "down"
    with publishing(target) as staging:
        write_json(staging / "a.json", {"é": 1})
        assert not target.exists()
    assert read_json(target / "a.json") == {"é": 1}
    assert [path.name for path in target.parent.iterdir()] == ["down"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_nothing_is_left_after_an_error(tmp_path, error):
    with pytest.raises(error), publishing(tmp_path / "x") as staging:
        write_file(staging / "a", b"half")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_what_may_be_replaced(tmp_path):
    target = tmp_path / "x"
    target.mkdir()
    with publishing(target) as staging:  # an empty directory is no obstacle
        write_file(staging / "a.json", "1")
    with pytest.raises(FileError, match="exists and is not empty"), publishing(target):
        pass
    with publishing(target, overwrite=True, patterns=("*.json",)) as staging:
        write_file(staging / "b.json", "2")
    assert [path.name for path in target.iterdir()] == ["b.json"]
    (target / "thesis.tex").write_text("years of work")
    with pytest.raises(FileError, match=r"holds thesis.tex"), publishing(target, True, ("*.json",)):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "file").write_text("")
    for target in (tmp_path / "file", tmp_path / "file" / "x", tmp_path / "file" / "x" / "y"):
        with pytest.raises(FileError, match="can't create .*: Not a directory"), publishing(target):
            pass


def test_a_path_that_is_relative_or_ends_in_a_slash(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("here", "other/"):
        with publishing(type(tmp_path)(path)) as staging:
            write_file(staging / "a", "1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "other"]
