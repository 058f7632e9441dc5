"""When the compiled kernels of a short process are loaded.

Numba's import and the loading of kernels that are kept take as long as the first token of a short prompt. So one
process with a short prompt computes that in plain NumPy and loads the kernels behind the first step, if another one
comes. What decides is known before anything is computed, so the same call gives the same text. Several ranks, whose
start takes longer anyway, and the invariant mode, whose bits must be those of every other way, begin with the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from mpitp.backend.accelerator import use_accelerator
from mpitp.comm.group import Group
from mpitp.comm.start import agree_on_accelerator

MOST_ROWS = 64  # of all prompts: with more of them the kernels gain what they cost in the first step

OnToken = Callable[[int, int], None]


def is_late(group: Group, prompts: Sequence[Sequence[int]], *, invariant: bool) -> bool:
    """Whether these prompts are computed without kernels."""
    return group.size == 1 and not invariant and sum(map(len, prompts)) <= MOST_ROWS


@contextmanager
def late_kernels(group: Group, on_token: OnToken, max_new_tokens: int) -> Iterator[OnToken]:
    """Generate meanwhile, without kernels up to the first token; what is to be told of tokens in place of `on_token`.

    `group` was started with `accelerate=False`.
    """
    is_loaded = max_new_tokens == 1  # or never needed

    def told(index: int, token: int) -> None:
        nonlocal is_loaded
        on_token(index, token)
        if not is_loaded:
            agree_on_accelerator(group)
            is_loaded = True

    use_accelerator(False)
    try:
        yield told
    finally:
        use_accelerator(None)
