"""A run directory that a group shares: a colleague goes on with a run, or is told whose it is and what helps."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpitp.errors import FileError
from mpitp.train import lock as lock_module
from mpitp.train.lock import RunLock
from tests.train.run_case import losses, make_data, tables, write_run_file

ALICE, BOB, GROUP = 61001, 61002, 61000
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become other users")

AS_USER = """
import os, sys
from mpitp.cli import main
user, umask, words = int(sys.argv[1]), int(sys.argv[2], 8), sys.argv[3:]
os.environ["MPITP_ACCELERATOR"] = "off"
# Another user may not be let into this checkout: a run of root's brings in all that there is to be imported.
main([words[0], words[1], "--set", f"train.run_dir={os.path.dirname(words[1])}/first-{os.getpid()}"])
os.setgroups([]); os.setgid(61000); os.setuid(user); os.umask(umask)
sys.exit(main(words))
"""


def as_user(user: int, umask: str, *words: str) -> subprocess.CompletedProcess[str]:
    """`mpitp WORDS` as this user of the group."""
    command = [sys.executable, "-c", AS_USER, str(user), umask, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd="/")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder of the group, in which what is made belongs to the group, with a text and a run file."""
    folder = Path(tempfile.mkdtemp())
    data = make_data(folder)
    settings = tables(data, folder / "run", train_steps=1, checkpoint_every=1, train_eval_every=0)
    write_run_file(folder / "run.toml", settings)
    (folder / "run").mkdir()
    os.chown(folder / "run", 0, GROUP)
    os.chmod(folder / "run", 0o2775)
    os.chmod(folder, 0o755)
    yield folder
    shutil.rmtree(folder)


MORE = ("--resume", "auto", "--set", "train.steps=2")


@only_root
def test_a_colleague_goes_on_with_a_run(shared: Path) -> None:
    path = str(shared / "run.toml")
    assert as_user(ALICE, "002", "train", path).returncode == 0
    done = as_user(BOB, "002", "train", path, *MORE)
    assert done.returncode == 0, done.stderr
    assert len(losses(shared / "run")) == 2
    done = as_user(ALICE, "002", "train", path, "--set", "train.overwrite=true")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (shared / "run/checkpoints").iterdir()] == ["step-00000001"]


@only_root
def test_what_a_colleague_has_closed_is_named_with_owner_and_cure(shared: Path) -> None:
    path = str(shared / "run.toml")
    assert as_user(ALICE, "022", "train", path).returncode == 0
    done = as_user(BOB, "022", "train", path, *MORE)
    checkpoints = shared / "run/checkpoints"
    assert done.returncode == 4 and done.stderr.splitlines()[-1] == (
        f"FileError: can't write to {checkpoints}: Permission denied ({checkpoints} belongs to {ALICE}, group {GROUP}, "
        f"mode drwxr-sr-x; you are {BOB}): its owner can open it to the group (chmod g+w {checkpoints}; a umask of 002 "
        "does so from the beginning), or choose another place"
    )


@only_root
@pytest.mark.parametrize("umask", ["002", "022", "077"])
def test_the_lock_is_as_open_as_its_folder(shared: Path, umask: str) -> None:
    assert as_user(ALICE, umask, "train", str(shared / "run.toml")).returncode == 0
    assert stat.S_IMODE((shared / "run/.lock").stat().st_mode) == 0o664


LOCK = """
import os, sys
from pathlib import Path
from mpitp.errors import FileError
from mpitp.train import lock
import mpitp.error_stream
lock.PATIENCE_SECONDS = 0.0
os.setgroups([]); os.setgid(61000); os.setuid(61002)
try:
    with lock.RunLock(Path(sys.argv[1])):
        print("locked")
except FileError as error:
    print(error)
"""


def bob_locks(folder: Path) -> str:
    done = subprocess.run([sys.executable, "-c", LOCK, str(folder)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@only_root
def test_lock_of_an_earlier_version_that_only_its_owner_may_write(shared: Path) -> None:
    """It is locked by both, whoever may write to it."""
    lock = shared / "run/.lock"
    lock.write_text("process 1 on n1, user alice")
    os.chown(lock, ALICE, GROUP)
    os.chmod(lock, 0o644)
    assert bob_locks(shared / "run") == "locked\n"
    with open(lock) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "is in use by another job (process 1 on n1, user alice); wait for it" in bob_locks(shared / "run")
    os.chmod(lock, 0o600)
    assert bob_locks(shared / "run").startswith(
        f"can't lock {lock}: Permission denied ({lock} belongs to {ALICE}, group {GROUP}, mode -rw-------; you are"
    )


@pytest.mark.parametrize("code", [errno.EBADF, errno.EACCES])
def test_file_system_that_locks_only_what_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(FileError, match=r"can't lock .*\.lock: Permission denied"), RunLock(tmp_path):
        pass


@pytest.mark.parametrize("target", ["thesis", "nothing"])
def test_a_link_is_not_followed(tmp_path: Path, target: str) -> None:
    (tmp_path / "thesis").write_text("years of work")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.lock").symlink_to(tmp_path / target)
    with (
        pytest.raises(FileError, match=r"\.lock is a link, which isn't followed.*remove it"),
        RunLock(tmp_path / "run"),
    ):
        pass
    assert (tmp_path / "thesis").read_text() == "years of work" and not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_no_lock(tmp_path: Path, make: object) -> None:
    make(tmp_path / ".lock")  # type: ignore[operator]
    with pytest.raises(FileError, match=r"\.lock(: Is a directory| is no regular file)"), RunLock(tmp_path):
        pass


def test_no_name_is_left_of_a_job_that_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "PATIENCE_SECONDS", 0.0)
    with RunLock(tmp_path):
        assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} on ")
    assert (tmp_path / ".lock").read_text() == ""
