"""Directories are published whole or not at all."""

import os
import signal
import socket
from pathlib import Path

import pytest

from mpitp.errors import FileError
from mpitp.files import (
    discard_leftovers,
    make_staging,
    publishing,
    read_json,
    read_regular,
    remove,
    scratch_beside,
    write_file,
    write_json,
)


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


def test_folders_that_were_made_for_nothing_go_again(tmp_path):
    (tmp_path / "there").mkdir()
    for place in ("a/b/x", "there/a/x"):
        with pytest.raises(KeyError), publishing(tmp_path / place) as staging:
            write_file(staging / "a", b"half")
            raise KeyError
    with pytest.raises(KeyError), scratch_beside(tmp_path / "a/b/x", ".scratch-") as scratch:
        write_file(scratch / "a", b"half")
        raise KeyError
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]
    with scratch_beside(tmp_path / "a/b/x", ".scratch-"), publishing(tmp_path / "a/b/x") as staging:
        write_file(staging / "a", b"whole")
    assert [path.name for path in (tmp_path / "a/b").rglob("*")] == ["x", "a"]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_nothing_is_left_when_the_process_is_asked_to_end(tmp_path, signum):
    with pytest.raises(SystemExit) as ended, publishing(tmp_path / "x") as staging:
        write_file(staging / "a", b"half")
        signal.raise_signal(signum)
    assert ended.value.code == 128 + signum and list(tmp_path.iterdir()) == []
    assert signal.getsignal(signum) is signal.SIG_DFL


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


@pytest.fixture(params=["pipe", "device", "socket"])
def special(request, tmp_path):
    """A file that isn't a regular one, and what it is called."""
    path = tmp_path / "special"
    if request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "device":
        path.symlink_to("/dev/zero")
    else:
        listener = socket.socket(socket.AF_UNIX)
        request.addfinalizer(listener.close)
        listener.bind(os.path.relpath(path))
    return path, request.param


def test_special_files_are_refused_by_kind(special):
    path, kind = special
    for pipes in ("refused", "opened"):
        with pytest.raises(FileError, match=f"{path} is a {kind}, expected a regular file"):
            read_regular(path, pipes=pipes)
    with pytest.raises(FileError, match=f"is a {kind}"):
        read_json(path)


def test_a_pipe_that_was_handed_open_is_read_where_that_is_wanted():
    reading, writing = os.pipe()
    os.write(writing, b"some text")
    os.close(writing)
    with pytest.raises(FileError, match="is a pipe"):
        read_regular(f"/dev/fd/{reading}")
    assert read_regular(f"/dev/fd/{reading}", pipes="opened") == b"some text"
    os.close(reading)


def test_the_limit_of_size_is_counted(tmp_path):
    (tmp_path / "x").write_bytes(b"12345")
    assert read_regular(tmp_path / "x", 5) == b"12345"
    with pytest.raises(FileError, match="more than 4 bytes"):
        read_regular(tmp_path / "x", 4)
    with pytest.raises(FileError, match="more than 9 bytes"):  # a file that says it has 0 bytes
        read_regular("/proc/self/maps", 9)


# Links


def contents_of(directory):
    return {path.name: path.read_text() for path in directory.iterdir()}


@pytest.mark.parametrize("state", ["filled", "empty", "missing", "a link to a link"])
def test_what_is_published_to_a_link_goes_where_it_leads(tmp_path, state):
    scratch, link = tmp_path / "disk" / "scratch", tmp_path / "home" / "link"
    link.parent.mkdir()
    if state != "missing":
        scratch.mkdir(parents=True)
    if state == "filled":
        (scratch / "old.json").write_text("old")
    place = tmp_path / "disk" / "scratch"
    if state == "a link to a link":
        (tmp_path / "between").symlink_to(scratch)
        place = tmp_path / "between"
    link.symlink_to(place)
    with publishing(link, overwrite=True, patterns=["*.json"]) as staging:
        (staging / "new.json").write_text("new")
    assert link.is_symlink() and os.readlink(link) == str(place)
    assert contents_of(scratch) == contents_of(link) == {"new.json": "new"}
    assert [path.name for path in scratch.parent.iterdir()] == ["scratch"]
    assert [path.name for path in link.parent.iterdir()] == ["link"]


def test_an_error_leaves_the_link_and_what_it_leads_to(tmp_path):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "old.json").write_text("old")
    (tmp_path / "link").symlink_to("scratch")
    with pytest.raises(FileError, match="link exists and is not empty"), publishing(tmp_path / "link"):
        pass
    with pytest.raises(KeyError), publishing(tmp_path / "link", overwrite=True, patterns=["*.json"]):
        raise KeyError
    assert contents_of(tmp_path / "link") == {"old.json": "old"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "scratch"]


def test_leftovers_beside_the_place_of_a_link_are_found(tmp_path):
    for folder in ("home", "disk"):
        (tmp_path / folder).mkdir()
    for name in (".model.1234.partial", ".model.1234.old"):
        (tmp_path / "disk" / name).mkdir()
    (tmp_path / "disk" / ".model.5678.old").symlink_to("elsewhere")
    (tmp_path / "home" / "link").symlink_to(tmp_path / "disk" / "model")
    discard_leftovers(tmp_path / "home" / "link")
    assert list((tmp_path / "disk").iterdir()) == []


def test_places_that_cannot_be_replaced(tmp_path, monkeypatch):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(FileError, match="leads back to itself"):
        make_staging(tmp_path / "a")
    (tmp_path / "mounted").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "mounted")
    with pytest.raises(FileError, match="mounted is where a file system begins.*name a folder inside it"):
        make_staging(tmp_path / "mounted")


def test_old_one_comes_back_when_the_new_one_did_not_get_its_name(tmp_path, monkeypatch):
    """A process that is killed between the two renames of `publish`; at any other moment the target is there."""
    target = tmp_path / "x"
    with publishing(target) as staging:
        write_file(staging / "a", "old")
    renames, real = [], Path.rename

    def rename(self, to):
        renames.append(self)
        if len(renames) == 2:
            raise KeyboardInterrupt  # nothing after it happens, as after kill -9
        return real(self, to)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        patch.setattr("mpitp.files.discard", lambda path: None)
        with pytest.raises(KeyboardInterrupt), publishing(target, overwrite=True, patterns=("a",)) as staging:
            write_file(staging / "a", "new")
    assert not target.exists() and len(list(tmp_path.iterdir())) == 2
    discard_leftovers(target)
    assert [path.name for path in tmp_path.iterdir()] == ["x"] and (target / "a").read_text() == "old"
    (tmp_path / ".x.1.old").mkdir()
    (tmp_path / ".x.1.partial").mkdir()
    discard_leftovers(target)
    assert [path.name for path in tmp_path.iterdir()] == ["x"] and (target / "a").read_text() == "old"


def test_what_stays_is_named_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below a directory the system names the last part of a path alone, which says nothing."""
    stays = tmp_path / "old" / "step-1" / "f[1]"
    stays.parent.mkdir(parents=True)
    stays.write_text("x")
    unlink = os.unlink

    def refuse(path: str, **keywords: int) -> None:
        if os.path.basename(path) == stays.name:
            raise PermissionError(1, "Operation not permitted", path)
        unlink(path, **keywords)

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(FileError) as raised:
        remove(tmp_path / "old")
    assert str(raised.value).startswith(f"can't remove {stays}: Operation not permitted")
