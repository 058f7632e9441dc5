"""Whether a model's activations are rounded before they meet weights in 8 or 4 bits."""

from __future__ import annotations

import numpy as np

from mpitp.config import ACTIVATIONS
from mpitp.errors import ConfigError
from mpitp.layers.rounded_inputs import round_inputs
from mpitp.models.model import CausalLM

AUTO, INT8, _ = ACTIVATIONS


def round_activations(model: CausalLM, choice: str = AUTO) -> None:
    """Do as `choice` says, one of ACTIVATIONS.

    "auto": "int8" where a processor multiplies whole numbers faster, in float32 and outside of the invariant mode,
    whose texts stay what they were. Raises ConfigError for "int8" with weights that are floats.
    """
    is_rounded = model.config.grouping is not None
    if not is_rounded:
        refuse_rounding(choice)
    is_faster = model.site.device.xp is np and model.dtype == np.float32 and not model.site.num_blocks
    if choice == INT8 or (choice == AUTO and is_rounded and is_faster):
        round_inputs(model.layers.values())


def refuse_rounding(choice: str) -> None:
    """For a model whose weights are floats. Raises ConfigError for "int8"."""
    if choice == INT8:
        raise ConfigError(
            "--activations int8 goes with weights in 8 or 4 bits, and this model's are floats; leave it out, or round "
            "the weights of one that continues text by mpitp convert --weights"
        )
