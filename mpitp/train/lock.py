"""One run directory, one job: a second job on the same directory is refused instead of mixing its files in."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import sys
import time
from pathlib import Path
from types import TracebackType

from mpitp.errors import FileError
from mpitp.files import os_failure

_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
PATIENCE_SECONDS = 3.0


class RunLock:
    """Holds `directory/.lock` while a `with` block lasts; the system gives it back when the process dies.

    Raises FileError when another job holds it, naming host and process. A file system that knows no locks (some
    parallel ones, as they are mounted) is gone along with, and said so.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / ".lock"
        self._descriptor = -1

    def __enter__(self) -> RunLock:
        try:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            self._lock()
        except BlockingIOError:
            holder = os.pread(self._descriptor, 200, 0).decode(errors="replace") or "another process"
            os.close(self._descriptor)
            raise FileError(
                f"{self.path.parent} is in use by another job ({holder}); wait for it, or choose another train.run_dir"
            ) from None
        except OSError as error:
            if self._descriptor < 0 or error.errno not in _NO_LOCKS:
                raise os_failure("lock", self.path, error) from error
            print(f"mpitp: {self.path} can't be locked here ({error.strerror}); see to it yourself that no second "
                  "job runs in this directory", file=sys.stderr, flush=True)  # fmt: skip
        with contextlib.suppress(OSError):  # a full disk; the name is for people only
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        return self

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
        os.close(self._descriptor)
