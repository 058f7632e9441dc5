"""`mpitp generate --trace`: an observer around a generating run, where one is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpitp.comm.group import Group
from mpitp.error_stream import ErrorStream

if TYPE_CHECKING:
    from mpitp.trace.tracer import Tracer


def make_tracer(path: str | None) -> Tracer | None:
    """What will write to `path`; None: nothing is traced. Raises FileError where nothing can be written there."""
    if not path:
        return None
    from mpitp.trace.timeline import check_writable
    from mpitp.trace.tracer import Tracer

    check_writable(path)
    return Tracer()


def finish_trace(tracer: Tracer | None, group: Group, path: str) -> None:
    """Write what was seen, and tell the ledger. A collective over the group of the job."""
    if tracer is None:
        return
    from mpitp.trace.timeline import finish

    trace = finish(tracer, group, path, "generate")
    if group.rank == 0:
        print(f"{trace}\n\ntimeline in {path}: open it in https://ui.perfetto.dev", file=ErrorStream())
