"""Dynamic loss scaling (Micikevicius et al. 2018, section 3.2): gradients that float16 could not hold are kept large.

    backward runs on scale * loss, so every gradient is scale times too large; norm and update divide by it again
    a step whose gradients overflow is left out, and the scale halved; after 2000 clean steps it is doubled

The scale is a power of two: it changes exponents alone. bfloat16 has float32's range and needs none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mpitp.backend.precision import FLOAT16
from mpitp.errors import FileError

FIRST_SCALE = 2.0**16
SMALLEST, LARGEST = 2.0**-14, 2.0**24  # below it the gradients themselves are beyond float16
CLEAN_STEPS = 2000


@dataclass(slots=True)
class LossScale:
    """`scale`, the clean steps since it last changed, and how many steps were left out in all.

    Every rank has the same one, since it is told of the same outcomes.
    """

    scale: float = 1.0
    is_dynamic: bool = False
    clean_steps: int = 0
    skipped: int = 0

    @classmethod
    def of(cls, dtype: Any) -> LossScale:
        """That of a model stored as `dtype`: 1 for ever, unless it is float16."""
        return cls(FIRST_SCALE, True) if dtype == FLOAT16 else cls()

    def leaves_out(self, loss: float, norm: float) -> bool:
        """Whether a step of this loss and gradient norm has overflowed on the way back alone, and a smaller scale may
        help.
        """
        return self.is_dynamic and math.isfinite(loss) and not math.isfinite(norm) and self.scale > SMALLEST

    def after_overflow(self) -> None:
        """A step was left out."""
        self.scale, self.clean_steps, self.skipped = self.scale / 2, 0, self.skipped + 1

    def after_clean_step(self) -> None:
        """A step was taken."""
        self.clean_steps += self.is_dynamic
        if self.clean_steps == CLEAN_STEPS:
            self.scale, self.clean_steps = min(self.scale * 2, LARGEST), 0

    def state(self) -> dict[str, float | int]:
        """What a checkpoint keeps."""
        return {"scale": self.scale, "clean_steps": self.clean_steps, "skipped": self.skipped}

    def restore(self, state: Any) -> None:
        """Go on from `state()`; None is that of a checkpoint that has none. Raises FileError for anything else."""
        if state is None or not self.is_dynamic:
            return
        try:
            scale, clean, skipped = float(state["scale"]), int(state["clean_steps"]), int(state["skipped"])
        except (KeyError, TypeError, ValueError):
            raise FileError(
                f"the checkpoint's loss_scale is {state!r:.80}: expected scale, clean_steps, skipped"
            ) from None
        if not (SMALLEST / 2 <= scale <= LARGEST and 0 <= clean < CLEAN_STEPS and skipped >= 0):
            raise FileError(f"the checkpoint's loss_scale is {state!r:.80}: no state that a run can be in")
        self.scale, self.clean_steps, self.skipped = scale, clean, skipped
