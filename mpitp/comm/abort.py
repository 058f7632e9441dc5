"""One rank's failure ends the whole job, with one message, in seconds.

Under MPI a rank that raises leaves the others waiting in a collective, and Python's own exit waits with them in
`MPI_Finalize`: the job would hang for ever. Two things prevent that:

- `guarded(program)` runs a program (the `mpitp` command does so): whatever ends it, `SystemExit` and Ctrl-C included,
  becomes a message, an exit code and, on several ranks, `MPI_Abort`.
- `install_abort_hook()` does the same for exceptions nobody catches in a script of one's own, and for threads.

Rank 0 speaks at once. Another rank waits a moment first: when all ranks fail alike, they find that out and leave, and
the message is seen once; when it fails alone, it speaks itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
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

from mpitp.comm.environment import launch_claim
from mpitp.comm.progress import progress
from mpitp.errors import MpitpError, Preempted
from mpitp.files import os_failure

WAIT_FOR_RANK_0_SECONDS = 1.0
WAIT_FOR_OTHERS_SECONDS = 0.5  # less: when not all fail, rank 0 has ended the job before another speaks too
MESSAGE_TAKES_SECONDS = 0.3  # to the launcher, which forgets what it has not read when the job is aborted
ABORT_MAY_TAKE_SECONDS = 5.0
INTERRUPTED = 130  # as the shell reports a program ended by Ctrl-C
OUT_OF_MEMORY = 3  # the sizes asked for are more than this machine has room for
OUTPUT_IS_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
READER_LEFT = 141  # and one that wrote into a pipe that nobody reads any more, as in `mpitp ... | head`


def guarded(program: Callable[[], int]) -> int:
    """Run `program` and return its exit code. A failure is reported; on several ranks it ends the job from here."""
    try:
        code = _run_to_last_output(program)
    except Preempted as stop:  # all ranks have agreed to stop, so they can end in the ordinary way
        if _rank_and_size()[0] == 0:
            _say(str(stop))
        code = stop.exit_code
    except BaseException as error:
        return end_job(error)
    _let_every_rank_leave()
    return code


def _run_to_last_output(program: Callable[[], int]) -> int:
    """The program's exit code, its output written: what Python finds out about it at its own end, it says badly."""
    try:
        code = program()
    except SystemExit as stop:
        code = _code_of(stop)
        if code:
            raise
    except OSError as error:
        if error.errno in OUTPUT_IS_FULL and error.filename is None:  # of files we tell the name
            raise os_failure("write to", "standard output", error) from error
        raise
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise os_failure("write to", "standard output", error) from error
    return code


def _let_every_rank_leave() -> None:
    """From here on only the exit code counts, and it must be the same on all ranks.

    `srun --kill-on-bad-exit` terminates the other ranks the moment the first has left with a code, and reports 143
    instead; a signal to stop that comes late would do the like.
    """
    if _rank_and_size()[1] > 1:
        with contextlib.suppress(ValueError):  # not in the main thread
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
                signal.signal(number, signal.SIG_IGN)


def end_job(error: BaseException) -> int:
    """Report `error`, and abort all ranks of the job. Returns the exit code only when this rank is the only one."""
    if isinstance(error, BrokenPipeError) and _let_go_of_unread_output():
        error = SystemExit(READER_LEFT)
    rank, size = _rank_and_size()
    text = _describe(error)
    if size > 1 and _code_of(error) != READER_LEFT:
        text = text or f"left with exit code {_code_of(error)}"
    if size > 1:
        _end_all_ranks(rank, text if rank == 0 and _is_plain(error) else _with_rank(text, rank, size), _code_of(error))
    _say(text)
    return _code_of(error)


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


def _end_all_ranks(rank: int, text: str, code: int) -> NoReturn:
    limit = _after(ABORT_MAY_TAKE_SECONDS, _leave, text if rank else "", code)
    signal.alarm(2 * math.ceil(ABORT_MAY_TAKE_SECONDS))  # for calls that hold the interpreter lock, and so the timers
    if rank == 0:
        _say(text)
    progress.stop()
    mpi = _running_mpi() or _join_mpi()
    if _all_ranks_fail(mpi, WAIT_FOR_RANK_0_SECONDS if rank else WAIT_FOR_OTHERS_SECONDS):
        limit.cancel()
        _let_every_rank_leave()
        _after(ABORT_MAY_TAKE_SECONDS, os._exit, code)
        ctypes.CDLL(mpi.__file__).MPI_Finalize()  # mpi4py's holds the interpreter lock, and the timer would wait for it
        ctypes.CDLL(None).exit(code)  # not os._exit: MPICH tells its launcher good-bye in a handler of the C library
    if rank:
        _say(text)
        time.sleep(MESSAGE_TAKES_SECONDS)
    if mpi is not None:
        mpi.COMM_WORLD.Abort(code)
    os._exit(code)


def _after(seconds: float, action: Callable[..., Any], *arguments: Any) -> threading.Timer:
    timer = threading.Timer(seconds, action, arguments)
    timer.daemon = True
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
    because mpi4py holds the interpreter lock meanwhile, and `_end_all_ranks` has a timer in case the others don't come.
    """
    if launch_claim(os.environ).launcher == "Open MPI mpirun":
        return None  # ends the job itself when a rank leaves with a code
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI

        if MPI.Is_finalized():
            return None
        ctypes.CDLL(MPI.__file__).MPI_Init_thread(None, None, MPI.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))
    except (ImportError, RuntimeError, OSError, AttributeError):
        return None
    return MPI


def _leave(text: str, code: int) -> None:
    """The last resort. A rank that is killed is noticed by launchers that don't mind one that leaves with a code."""
    _say(text)
    if launch_claim(os.environ).launcher == "Open MPI mpirun":
        os._exit(code)
    os.kill(os.getpid(), signal.SIGKILL)


def install_abort_hook() -> None:
    """Let exceptions that nobody catches, in any thread, end the whole job. Call it once at the start of a script.

    `sys.exit` with a code passes no hook: use `guarded`, or `python -m mpi4py script.py`, where that matters.
    """
    sys.excepthook = _exception_hook
    threading.excepthook = _thread_hook


def _exception_hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    end_job(error.with_traceback(trace))


def _thread_hook(failed: Any) -> None:
    if failed.exc_value is not None and not isinstance(failed.exc_value, SystemExit):
        end_job(failed.exc_value)


def _rank_and_size() -> tuple[int, int]:
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


def _code_of(error: BaseException) -> int:
    if isinstance(error, MpitpError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, MemoryError):
        return OUT_OF_MEMORY
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 1


def _is_plain(error: BaseException) -> bool:
    """Whether the message is for users, who don't care which rank found it when it is the first."""
    return isinstance(error, MpitpError | KeyboardInterrupt | SystemExit | MemoryError)


def _describe(error: BaseException) -> str:
    if isinstance(error, MpitpError):
        return f"{type(error).__name__}: {error}"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, MemoryError):
        return f"MemoryError: {error}; a smaller model or batch needs less, and more ranks need less each"
    if isinstance(error, SystemExit):
        return "" if error.code is None or isinstance(error.code, int) else str(error.code)
    return "".join(traceback.format_exception(error)).rstrip()


def _with_rank(text: str, rank: int, size: int) -> str:
    return f"rank {rank} of {size} on {socket.gethostname()}: {text}"


def _say(text: str) -> None:
    if not text:
        return
    with contextlib.suppress(OSError, AttributeError):  # a full disk, a closed one (None)
        sys.stdout.flush()
    with contextlib.suppress(OSError, AttributeError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
