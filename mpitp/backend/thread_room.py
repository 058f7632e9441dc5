"""Whether this process may start the threads that its libraries will want, found out by starting them.

Limits of processes and threads (`ulimit -u`, a container's `--pids-limit`) end libraries in their own ways: OpenBLAS
interrupts the process, the tokenizers' library panics, a launcher waits for a rank that was never born.
"""

from __future__ import annotations

import resource
import threading
from collections.abc import Mapping
from pathlib import Path

from mpitp.errors import LaunchError

OWN_THREADS = 5  # of a rank beside BLAS and tokenizers: the MPI library's, the watchdog's, progress, a progress bar's
MOST_TRIED = 2000
CGROUP_LIMIT = Path("/sys/fs/cgroup/pids.max")


def can_start(threads: int) -> bool:
    """Whether so many threads can live at once beside those that do."""
    is_over = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(min(threads, MOST_TRIED)):
            thread = threading.Thread(target=is_over.wait, daemon=True)
            thread.start()
            started.append(thread)
    except (RuntimeError, MemoryError):
        return False
    finally:
        is_over.set()
        for thread in started:
            thread.join()
    return True


def require_threads(threads: int, for_what: str) -> None:
    """Raise LaunchError, which names the limit, where so many threads can't be started."""
    if not can_start(threads):
        raise LaunchError(thread_limit_words(f"{for_what} needs about {threads} more threads or processes"))


def thread_limit_words(what: str) -> str:
    """`what`, the limits in force and the cure."""
    limits = [
        f"{limit} (ulimit -u, of this user)" for limit in [resource.getrlimit(resource.RLIMIT_NPROC)[0]] if limit >= 0
    ]
    limits += [f"{limit} (pids of this container or session)" for limit in _cgroup_limits()]
    return (
        f"{what}, and they can't be started: the limit of processes and threads is "
        f"{' and '.join(limits) or 'not told'}; raise it, or take fewer ranks and OMP_NUM_THREADS=1 RAYON_NUM_THREADS=1"
    )


def _cgroup_limits() -> list[str]:
    try:
        limit = CGROUP_LIMIT.read_text().strip()
    except OSError:
        return []
    return [limit] if limit.isdecimal() else []


def threads_of_libraries(environ: Mapping[str, str]) -> int:
    """The threads that BLAS and the tokenizers' library start, as the variables have it."""
    counts = [environ.get(name, "") for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")]
    blas = max((int(count) for count in counts if count.isdecimal() and len(count) < 6), default=1)
    rayon = environ.get("RAYON_NUM_THREADS", "")
    return blas - 1 + (int(rayon) if rayon.isdecimal() and len(rayon) < 6 else 1)
