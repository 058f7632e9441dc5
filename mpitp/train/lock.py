"""One run directory, one job: a second job on the same directory is refused instead of mixing its files in."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from pathlib import Path
from types import TracebackType

from mpitp.error_stream import ErrorStream
from mpitp.errors import FileError
from mpitp.files import os_failure, user_name

_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
PATIENCE_SECONDS = 3.0
LOCK = ".lock"  # its name in the directory


class RunLock:
    """Holds `directory/.lock` while a `with` block lasts; the system gives it back when the process dies.

    Raises FileError when another job holds it, naming user, host and process. A file system that knows no locks (some
    parallel ones, as they are mounted) is gone along with, and said so. Who may write to the directory may lock it,
    whoever has made the file.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / LOCK
        self._descriptor = -1

    def __enter__(self) -> RunLock:
        try:
            self._take()
        except BlockingIOError:
            holder = os.pread(self._descriptor, 200, 0).decode(errors="replace") or "another process"
            os.close(self._descriptor)
            raise FileError(
                f"{self.path.parent} is in use by another job ({holder}); wait for it, or choose another train.run_dir"
            ) from None
        except OSError as error:
            if self._descriptor < 0 or error.errno not in _NO_LOCKS:
                raise self._failure(error) from error
            print(f"mpitp: {self.path} can't be locked here ({error.strerror}); see to it yourself that no second "
                  "job runs in this directory", file=ErrorStream(), flush=True)  # fmt: skip
        self._write(f"process {os.getpid()} on {socket.gethostname()}, user {user_name(os.getuid())}")
        return self

    def _take(self) -> None:
        """Lock the file that lies there: one that an ending job has taken away meanwhile keeps nobody out."""
        while True:
            self._descriptor = self._open()
            self._lock()
            if self._is_there():
                return
            os.close(self._descriptor)
            self._descriptor = -1

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    def _open(self) -> int:
        """The file itself, never what a link leads to; one that can't be written to can be locked all the same."""
        flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(self.path, os.O_RDWR | flags)
        except FileNotFoundError:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | flags, 0o666)
            with contextlib.suppress(OSError):  # as open as the directory, whatever the umask: others may come after us
                os.fchmod(descriptor, 0o600 | (self.path.parent.stat().st_mode & 0o066))
        except PermissionError:
            descriptor = os.open(self.path, os.O_RDONLY | flags)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise FileError(f"{self.path} is no regular file, so it can't be this directory's lock; remove it")
        return descriptor

    def _failure(self, error: OSError) -> FileError:
        if error.errno == errno.ELOOP:
            return FileError(f"{self.path} is a link, which isn't followed: it could lead to any file; remove it")
        if self._descriptor >= 0 and error.errno in (errno.EBADF, errno.EACCES, errno.EPERM):  # NFS: needs to write
            return os_failure("lock", self.path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
        return os_failure("lock", self.path, error)

    def _write(self, holder: str) -> None:
        """Say who holds the lock, for people; nothing depends on it. A full disk or a colleague's file refuses it."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, holder.encode(), 0)

    def _lock(self) -> None:
        """Take the lock; a job that has just ended in failure may need a moment until its last process is gone."""
        end = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise
                time.sleep(0.05)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._write("")
        os.close(self._descriptor)
