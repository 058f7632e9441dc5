"""Where a step's time goes: its functions and the group's collectives, wrapped from outside for a few steps.

Nothing in the layers knows of this. The names that the layers' modules use for ops are replaced for the time of a
`with` block, so a step that is timed as such runs the untouched code.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from mpitp.comm.group import Group, Pending

COMMUNICATION = "communication"
LINEARS = "linear products"

# module -> category -> functions, as that module names them
WATCHED: dict[str, dict[str, tuple[str, ...]]] = {
    "mpitp.layers.product": {LINEARS: ("linear_forward", "linear_input_grad", "linear_weight_grad")},
    "mpitp.layers.linear": {"bias gradients": ("linear_bias_grad",)},
    "mpitp.layers.attention": {"rotary positions": ("rope_forward", "rope_backward")},
    "mpitp.layers.keys": {"attention": ("attention_forward", "attention_backward")},
    "mpitp.layers.norm": {
        "norms": ("layer_norm_forward", "layer_norm_backward", "rms_norm_forward", "rms_norm_backward")
    },
    "mpitp.layers.mlp": {"activation": ("gelu_forward", "gelu_backward", "swiglu_forward", "swiglu_backward")},
    "mpitp.layers.loss": {"loss": ("row_max", "exp_sums", "target_logits", "cross_entropy_backward")},
    "mpitp.layers.embedding": {"embedding": ("embedding_forward", "embedding_backward")},
    "mpitp.optim.adamw": {"optimizer": ("adamw_update",)},
    "mpitp.optim.grad_norm": {"gradient norm": ("sum_of_squares",)},
}

COLLECTIVES = (
    "all_reduce",
    "all_reduce_in_order",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "start_all_reduce",
    "start_all_gather",
    "start_reduce_scatter",
    "start_all_to_all",
)


class Stopwatch:
    """Seconds by category; time inside a watched function that another one called counts for the inner one only."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inner: list[float] = []

    def watch(self, category: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn`, its time counted."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            started = self.clock()
            self._inner.append(0.0)
            try:
                return fn(*args, **kwargs)
            finally:
                took = self.clock() - started
                self.seconds[category] += took - self._inner.pop()
                if self._inner:
                    self._inner[-1] += took

        return watched


@contextmanager
def watch_functions(watch: Stopwatch) -> Iterator[None]:
    """Count the functions in `WATCHED` until the end of the block, in the whole process (so not with rank threads)."""
    with ExitStack() as stack:
        for module_name, categories in WATCHED.items():
            module = import_module(module_name)
            for category, names in categories.items():
                for name in names:
                    original = getattr(module, name)
                    stack.callback(setattr, module, name, original)
                    setattr(module, name, watch.watch(category, original))
        yield


@dataclass(slots=True)
class Calls:
    """Collectives that were called, and the bytes of the arrays handed to them."""

    sizes: list[tuple[str, int]] = field(default_factory=list)

    @property
    def total_bytes(self) -> int:
        """All of them together."""
        return sum(size for _, size in self.sizes)


@contextmanager
def watch_group(group: Group, watch: Stopwatch) -> Iterator[Calls]:
    """Count and time the collectives of this one group object until the end of the block."""
    calls, busy = Calls(), [False]

    def watched(name: str) -> Callable[..., Any]:
        method = watch.watch(COMMUNICATION, getattr(group, name))

        def collective(*args: Any, **kwargs: Any) -> Any:
            if busy[0]:  # one collective made of another counts once
                return method(*args, **kwargs)
            calls.sizes.append((name.removeprefix("start_"), _bytes_handed(name, args, kwargs)))
            busy[0] = True
            try:
                result = method(*args, **kwargs)
            finally:
                busy[0] = False
            return Pending(watch.watch(COMMUNICATION, result.wait)) if isinstance(result, Pending) else result

        return collective

    with ExitStack() as stack:
        for name in COLLECTIVES:
            setattr(group, name, watched(name))  # hides the class's method on this object
            stack.callback(delattr, group, name)
        yield calls


def _bytes_handed(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    if name == "all_reduce_in_order":  # partials travel as one running sum
        return (args[1] if len(args) > 1 else kwargs["like"]).nbytes
    given = args[0]
    return sum(block.nbytes for block in given) if isinstance(given, Sequence) else given.nbytes
