"""One error for all: when any rank fails, every rank raises the same error, so that none waits for the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpitp.comm.group import Group
from mpitp.errors import MpitpError


def raise_together(group: Group, error: Exception | None) -> None:
    """A collective: every rank passes its error or None; if any rank has one, all raise that of the lowest such rank.

    A user's error (MpitpError) is raised with the same type and message everywhere. Any other is a bug: the rank where
    it happened raises it itself, with its traceback, the others a RuntimeError that names rank and message.
    """
    is_bug = error is not None and not isinstance(error, MpitpError)
    told = RuntimeError(f"rank {group.rank}: {type(error).__name__}: {error}") if is_bug else error
    for rank, first in enumerate(group.all_gather_objects(told)):
        if first is not None:
            if error is not None and (is_bug or rank == group.rank):
                raise error
            raise first


def together(group: Group, action: Callable[[], Any]) -> Any:
    """Run `action` on every rank; an error on any rank is raised on all."""
    result, error = None, None
    try:
        result = action()
    except Exception as caught:
        error = caught
    raise_together(group, error)
    return result


def gather_together(group: Group, action: Callable[[], Any]) -> list[Any]:
    """Run `action` on every rank and give all results, in rank order, to all; an error on any is raised on all."""
    return group.all_gather_objects(together(group, action))


def on_first_rank(group: Group, action: Callable[[], Any]) -> Any:
    """Run `action` on the first rank and give its result to all; an error there is raised on all."""
    result = together(group, action if group.rank == 0 else lambda: None)
    return group.broadcast_object(result)
