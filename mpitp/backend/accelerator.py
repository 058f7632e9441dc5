"""Whether the passes around the matrix products run compiled (Numba), and how such a kernel is declared.

Numba is never needed. Where it is installed, kernels of `mpitp.ops.compiled` take the place of chains of NumPy calls
for float32 and float64 arrays in host memory; the chains stay the reference. `MPITP_ACCELERATOR=off` leaves it out.

All ranks of a job must take the same way, or the layouts would differ in their last bits: `comm.start` compares what
the ranks `offer()` and tells the result to `use_accelerator`.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from mpitp.errors import ConfigError

VARIABLE = "MPITP_ACCELERATOR"
VALUES = ("auto", "off")
OLDEST_NUMBA = (0, 62)  # its LLVM is the first that vectorises the kernels' loops as they are written

# A sum over a row may be taken in the order that suits the vector unit, which depends on the row's length alone. Never
# "nnan", "ninf", "arcp" or "afn": what isn't finite must be seen, and a quotient be rounded as NumPy rounds it.
ROW_SUM = frozenset({"reassoc", "contract", "nsz"})

_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))
_decided: bool | None = None  # None: not asked yet
_declaring = threading.RLock()


def is_accelerated(xp: Any, dtype: Any) -> bool:
    """Whether arrays of module `xp` and of `dtype` have compiled kernels in this job."""
    return xp is np and dtype in _DTYPES and _in_use()


def use_accelerator(decision: bool | None) -> None:
    """What the job has decided; None: this process decides when it is asked next, by what it offers."""
    global _decided
    _decided = decision


def decide_later() -> None:
    """Let this process decide when it is asked next. Raises ConfigError for an unknown MPITP_ACCELERATOR now."""
    _variable()
    use_accelerator(None)


def offer() -> str:
    """What this process could use, such as "Numba 0.68.1"; or "" and never an exception where Numba doesn't work.

    Raises ConfigError when the variable MPITP_ACCELERATOR has an unknown value.
    """
    return "" if _variable() == "off" else _numba_found()[0]


def accelerator_in_use() -> str:
    """What this job computes with, such as "Numba 0.68.1", or "none": the last bits depend on it."""
    return _numba_found()[0] if _in_use() else "none"


def describe_accelerator() -> str:
    """What is in use, or why nothing is."""
    if _in_use():
        return offer()
    if _variable() == "off":
        return f"off ({VARIABLE}=off)"
    return f"off ({_numba_found()[1] or 'the ranks differ'})"


def compiled(fastmath: frozenset[str] = frozenset(), inline: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Declare a kernel: compiled for the types of its arguments at its first call, kept on disk, run without the GIL.

    `fastmath`: liberties with floating point, none by default. `inline`: a helper of kernels, not kept by itself.
    """

    def declare(function: Callable[..., Any]) -> Any:
        import numba

        options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}
        options["fastmath"] = set(fastmath) if fastmath else False
        kernel = numba.njit(function, **options)
        if not inline:
            _keep(kernel, numba.config, Path(function.__code__.co_filename).parent)
        return kernel

    return declare


def _in_use() -> bool:
    if _decided is None:
        use_accelerator(bool(offer()))
    return bool(_decided)


def _variable() -> str:
    value = os.environ.get(VARIABLE) or "auto"
    if value not in VALUES:
        raise ConfigError(f"{VARIABLE}={value!r} is unknown; expected {' or '.join(VALUES)}")
    return value


@cache
def _numba_found() -> tuple[str, str]:
    """(what was found, "") or ("", why it can't be used)."""
    try:
        import numba
    except ImportError as error:  # not installed, or not for this NumPy
        missing = isinstance(error, ModuleNotFoundError) and error.name == "numba"
        return "", "Numba is not installed" if missing else f"Numba can't be imported: {error}"
    version = tuple(int(part) for part in numba.__version__.split(".")[:2])
    if version < OLDEST_NUMBA:
        return "", f"Numba {numba.__version__} is older than {'.'.join(map(str, OLDEST_NUMBA))}"
    return f"Numba {numba.__version__}", ""


def _keep(kernel: Any, config: Any, sources: Path) -> None:
    """Keep the kernel's code in a folder that is named by all the kernels' sources; nowhere, if none can be written.

    Numba by itself looks at one file alone, and wouldn't see that a helper in another one has changed.
    """
    folder = _writable_cache(sources, config.CACHE_DIR)
    if folder is None:
        return
    with _declaring:
        before, config.CACHE_DIR = config.CACHE_DIR, str(folder)
        try:
            kernel.enable_caching()
        finally:
            config.CACHE_DIR = before
    _save_one_at_a_time(kernel, folder)
    _forget_what_is_damaged(kernel)


def _save_one_at_a_time(kernel: Any, folder: Path) -> None:
    """Let one process at a time add to Numba's index: of two at once one could leave an entry for the other's code."""
    save = kernel._cache.save_overload

    def locked(signature: Any, code: Any) -> None:
        with suppress(OSError), (folder / "lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            save(signature, code)

    kernel._cache.save_overload = locked


def _forget_what_is_damaged(kernel: Any) -> None:
    """Let a kernel whose files can't be read (cut short by a crash of the machine) be compiled again."""
    load = kernel._cache.load_overload

    def tolerant(signature: Any, context: Any) -> Any:
        try:
            return load(signature, context)
        except Exception:  # whatever unpickling makes of other bytes
            kernel._cache.flush()
            return None

    kernel._cache.load_overload = tolerant


@cache
def _writable_cache(sources: Path, chosen: str) -> Path | None:
    """The first folder that can be written to: the user's choice (NUMBA_CACHE_DIR), beside the sources, the home's."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    candidates = [Path(chosen)] if chosen else [sources / "__pycache__", Path(home) / "mpitp"]
    for candidate in candidates:
        folder = candidate / f"numba-{_digest(sources)}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError:
            continue
    return None


def _digest(sources: Path) -> str:
    """Of everything that a kernel is made from."""
    files = [*sorted(sources.glob("*.py")), Path(__file__)]
    return hashlib.blake2b(b"\0".join(file.read_bytes() for file in files), digest_size=6).hexdigest()
