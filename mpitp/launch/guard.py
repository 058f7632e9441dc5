"""What every program runs in: whatever ends it becomes one message and an exit code, and ends the job on all ranks."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable

from mpitp.comm.abort import end_job, exit_code_of, let_every_rank_leave, rank_and_size, say
from mpitp.errors import Preempted
from mpitp.files import os_failure

OUTPUT_IS_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def guarded(program: Callable[[], int]) -> int:
    """Run `program` and return its exit code. A failure is reported; on several ranks it ends the job from here."""
    try:
        code = _run_to_last_output(program)
    except Preempted as stop:  # all ranks have agreed to stop, so they can end in the ordinary way
        if rank_and_size()[0] == 0:
            say(str(stop))
        code = stop.exit_code
    except BaseException as error:
        return end_job(error)
    let_every_rank_leave()
    return code


def _run_to_last_output(program: Callable[[], int]) -> int:
    """The program's exit code, its output written: what Python finds out about it at its own end, it says badly."""
    try:
        code = program()
    except SystemExit as stop:
        code = exit_code_of(stop)
        if code:
            raise
    except OSError as error:
        if error.errno in OUTPUT_IS_FULL and error.filename is None:  # of files we tell the name
            raise os_failure("write to", "standard output", error) from error
        if error.filename is not None:  # a path that nobody looked at before: too long, on a disk that has failed, ...
            raise os_failure("use", str(error.filename), error) from error
        raise
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise os_failure("write to", "standard output", error) from error
    return code
