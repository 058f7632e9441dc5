"""Where a thread stands, asked from another one, without the deadlock that CPython before 3.12 has there.

`sys._current_frames` holds the interpreter's list of threads while it builds its answer. Building it allocates; before
3.12 an allocation may collect garbage, that runs finalizers, and a finalizer that lets another thread run leaves the
list held. Whatever needs the list next, such as a second call or the start of a thread, then waits for it with the
interpreter's lock in its hand, and no thread goes on any more.
"""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType

_looking = threading.Lock()  # one at a time, so that collection is switched on again by who switched it off


def frame_of(thread: int | None) -> FrameType | None:
    """The frame in which a thread, named by its `ident`, stands; None where there is no such thread (any more)."""
    with _looking:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames().get(thread or 0)
        finally:
            if collects:
                gc.enable()
