"""One rank's failure ends the whole job, with one message, in seconds.

Under MPI a rank that raises leaves the others waiting in a collective, and Python's own exit waits with them in
`MPI_Finalize`: the job would hang for ever. `end_job(error)` makes a message, an exit code and, on several ranks,
`MPI_Abort` of it. Two things call it:

- `guarded(program)` of `launch/guard.py`, in which the `mpitp` command runs: `SystemExit` and Ctrl-C included;
- the hook that `install_abort_hook()` sets, for exceptions nobody catches in a script of one's own, and for threads.

Rank 0 speaks at once. Another rank waits a moment first: when all ranks fail alike, they find that out and leave, and
the message is seen once; when it fails alone, it speaks itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from mpitp.backend.thread_room import OWN_THREADS, can_start, thread_limit_words
from mpitp.comm.environment import launch_claim
from mpitp.comm.library import library_name
from mpitp.comm.progress import progress
from mpitp.comm.shm_room import shm_failure, shm_room
from mpitp.error_stream import ErrorStream
from mpitp.errors import LaunchError, MpitpError

WAIT_FOR_RANK_0_SECONDS = 1.0
WAIT_FOR_START_OF_RANK_0_SECONDS = 3.0
WAIT_FOR_OTHERS_SECONDS = 0.5  # less: when not all fail, rank 0 has ended the job before another speaks too
MESSAGE_TAKES_SECONDS = 0.3  # to the launcher, which forgets what it has not read when the job is aborted
ABORT_MAY_TAKE_SECONDS = 5.0
INTERRUPTED = 130  # as the shell reports a program ended by Ctrl-C
READER_LEFT = 141  # and one that wrote into a pipe that nobody reads any more, as in `mpitp ... | head`
OUT_OF_MEMORY = 3  # the sizes asked for are more than this machine has room for
MOST_LETTERS = 8000  # of a message


def let_every_rank_leave() -> None:
    """From here on only the exit code counts, and it must be the same on all ranks.

    `srun --kill-on-bad-exit` terminates the other ranks the moment the first has left with a code, and reports 143
    instead; a signal to stop that comes late would do the like.
    """
    if rank_and_size()[1] > 1:
        with contextlib.suppress(ValueError):  # not in the main thread
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
                signal.signal(number, signal.SIG_IGN)


def end_job(error: BaseException) -> int:
    """Report `error`, and abort all ranks of the job. Returns the exit code only when this rank is the only one."""
    if isinstance(error, BrokenPipeError) and _let_go_of_unread_output():
        error = SystemExit(READER_LEFT)
    rank, size = rank_and_size()
    text = _describe(error)
    if size > 1 and exit_code_of(error) != READER_LEFT:
        text = text or f"left with exit code {exit_code_of(error)}"
    if size > 1:
        end_all_ranks(
            rank, text if rank == 0 and _is_plain(error) else _with_rank(text, rank, size), exit_code_of(error)
        )
    say(text)
    return exit_code_of(error)


def _let_go_of_unread_output() -> bool:
    """Whether the reader of our output has left, as `head` does; what is still to be written then goes nowhere."""
    watch = select.poll()
    for descriptor in (1, 2):
        watch.register(descriptor, 0)  # only what is always told
    unread = [descriptor for descriptor, event in watch.poll(0) if event & (select.POLLERR | select.POLLHUP)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in unread:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
    return bool(unread)


def end_all_ranks(rank: int, text: str, code: int) -> NoReturn:
    """End the job of several ranks from this one, with `text` ("": nothing to say) and the exit code."""
    limit = _after(ABORT_MAY_TAKE_SECONDS, _leave, text if rank else "", code)
    signal.alarm(2 * math.ceil(ABORT_MAY_TAKE_SECONDS))  # for calls that hold the interpreter lock, and so the timers
    if rank == 0:
        say(text)
    progress.stop()
    mpi = _running_mpi() or _join_mpi()
    if _all_ranks_fail(mpi, _patience_seconds(rank, mpi)):
        limit.cancel()
        let_every_rank_leave()
        _after(ABORT_MAY_TAKE_SECONDS, os._exit, code)
        ctypes.CDLL(mpi.__file__).MPI_Finalize()  # mpi4py's holds the interpreter lock, and the timer would wait for it
        ctypes.CDLL(None).exit(code)  # not os._exit: MPICH tells its launcher good-bye in a handler of the C library
    if rank:
        say(text)
        time.sleep(MESSAGE_TAKES_SECONDS)
    if mpi is not None:
        mpi.COMM_WORLD.Abort(code)
    _abort_without_mpi(code)
    os._exit(code)


def _abort_without_mpi(code: int) -> None:
    """Tell MPICH's launcher to end the job, in its own words (PMI-1), where there is no MPI to tell it.

    For a rank that merely leaves it lets the others wait for ever.
    """
    descriptor = os.environ.get("PMI_FD", "")
    if descriptor.isdecimal():
        with contextlib.suppress(OSError):
            os.write(int(descriptor), f"cmd=init pmi_version=1 pmi_subversion=1\ncmd=abort exitcode={code}\n".encode())
            time.sleep(ABORT_MAY_TAKE_SECONDS)  # until it does


def _patience_seconds(rank: int, mpi: Any) -> float:
    """How long a rank waits for the others to fail too. Without MPI they begin one after another, on a busy machine."""
    if rank == 0:
        return WAIT_FOR_OTHERS_SECONDS
    return WAIT_FOR_RANK_0_SECONDS if mpi is not None else WAIT_FOR_START_OF_RANK_0_SECONDS


def _after(seconds: float, action: Callable[..., Any], *arguments: Any) -> threading.Timer:
    timer = threading.Timer(seconds, action, arguments)
    timer.daemon = True
    with contextlib.suppress(RuntimeError):  # at the limit of threads; an alarm has been set besides
        timer.start()
    return timer


def _all_ranks_fail(mpi: Any, seconds: float) -> bool:
    """Whether every rank has come here within these seconds: then each can leave with its own code.

    After an abort the launcher reports what it likes: srun kills the other ranks and returns 137. A barrier that is
    only started completes when all have entered it; a rank that goes on with its work never does.
    """
    request = None
    if mpi is not None and threading.current_thread() is threading.main_thread():  # another thread fails alone
        request = mpi.COMM_WORLD.Ibarrier()
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            if request is not None and request.Test():
                return True
            time.sleep(0.01)
    except mpi.Exception:  # it met another collective, which a rank had begun before it was interrupted
        pass
    return False


def _join_mpi() -> Any:
    """Start MPI only to abort it; None where that can't or needn't be.

    MPICH's launcher lets the other ranks wait for ever in `MPI_Init` for one that has left before its own. By ctypes,
    because mpi4py holds the interpreter lock meanwhile, and `end_all_ranks` has a timer in case the others don't come.
    """
    if launch_claim(os.environ).launcher == "Open MPI mpirun":
        return None  # ends the job itself when a rank leaves with a code
    if not can_start(OWN_THREADS):
        return None
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI

        claim = launch_claim(os.environ)
        if MPI.Is_finalized() or shm_failure(library_name(MPI), claim.local_size or 1, shm_room(), has_begun=True):
            return None  # where it would die of its start
        ctypes.CDLL(MPI.__file__).MPI_Init_thread(None, None, MPI.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))
    except (ImportError, RuntimeError, OSError, AttributeError):
        return None
    return MPI


def _leave(text: str, code: int) -> None:
    """The last resort. A rank that is killed is noticed by launchers that don't mind one that leaves with a code."""
    say(text)
    if launch_claim(os.environ).launcher == "Open MPI mpirun":
        os._exit(code)
    os.kill(os.getpid(), signal.SIGKILL)


def install_abort_hook() -> None:
    """Let exceptions that nobody catches, in any thread, end the whole job. Call it once at the start of a script.

    `sys.exit` with a code passes no hook: use `guarded` (`launch/guard.py`) or `python -m mpi4py script.py` for that.
    """
    sys.excepthook = _exception_hook
    threading.excepthook = _thread_hook


def _exception_hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    end_job(error.with_traceback(trace))


def _thread_hook(failed: Any) -> None:
    if failed.exc_value is not None and not isinstance(failed.exc_value, SystemExit):
        end_job(failed.exc_value)


def rank_and_size() -> tuple[int, int]:
    """From MPI where it runs with several ranks, else as the launcher claims.

    Failing before MPI starts must not start it, and ranks that wrongly came up alone are ranks of one job all the same.
    """
    mpi = _running_mpi()
    if mpi is not None and mpi.COMM_WORLD.Get_size() > 1:
        return mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
    claim = launch_claim(os.environ)
    return claim.rank, claim.size


def _running_mpi() -> Any:
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() else None


def exit_code_of(error: BaseException) -> int:
    """The exit code that an error, an interrupt or `sys.exit` stands for."""
    if isinstance(error, MpitpError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, MemoryError):
        return OUT_OF_MEMORY
    if _is_thread_limit(error):
        return LaunchError.exit_code
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 1


def _is_plain(error: BaseException) -> bool:
    """Whether the message is for users, who don't care which rank found it when it is the first."""
    return isinstance(error, MpitpError | KeyboardInterrupt | SystemExit | MemoryError) or _is_thread_limit(error)


def _is_thread_limit(error: BaseException) -> bool:
    """Whether Python, or a library written in Rust (whose panic is no Exception), could not start a thread."""
    marks = ("can't start new thread", "ThreadPoolBuildError", "failed to spawn thread")
    return not isinstance(error, OSError) and any(mark in str(error) for mark in marks)


def _describe(error: BaseException) -> str:
    if isinstance(error, MpitpError):
        return f"{type(error).__name__}: {_without_the_middle(str(error))}"
    if _is_thread_limit(error):
        return f"LaunchError: {thread_limit_words('threads are wanted')}"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, MemoryError):
        return f"MemoryError: {error}; a smaller model or batch needs less, and more ranks need less each"
    if isinstance(error, SystemExit):
        return "" if error.code is None or isinstance(error.code, int) else str(error.code)
    return "".join(traceback.format_exception(error)).rstrip()


def _without_the_middle(text: str) -> str:
    """A message that quotes a value of a hostile file or a word of the command line, however long, stays readable."""
    if len(text) <= MOST_LETTERS:
        return text
    left_out = len(text) - 3 * MOST_LETTERS // 4 - MOST_LETTERS // 8
    return f"{text[: 3 * MOST_LETTERS // 4]} [... {left_out} letters ...] {text[-(MOST_LETTERS // 8) :]}"


def _with_rank(text: str, rank: int, size: int) -> str:
    return f"rank {rank} of {size} on {socket.gethostname()}: {text}"


def say(text: str) -> None:
    """A message on stderr, after what is on its way to stdout; where that is closed or full, none."""
    if not text:
        return
    with contextlib.suppress(OSError, AttributeError):  # a full disk, a closed one (None)
        sys.stdout.flush()
    with contextlib.suppress(BrokenPipeError):
        stream = ErrorStream()
        stream.write(text + "\n")
        stream.flush()
