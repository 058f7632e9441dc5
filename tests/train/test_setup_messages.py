"""Mistakes in the model's own fields of a run file are told as such, with the nearest known field."""

from __future__ import annotations

import pytest

from mpitp.errors import ConfigError
from mpitp.models import config_from_hf


def test_a_mistyped_field_names_the_nearest_known_one() -> None:
    fields = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    with pytest.raises(ConfigError, match="'intermediat_size'.*did you mean 'intermediate_size'"):
        config_from_hf({**fields, "vocab_size": 9, "intermediate_size": 8, "intermediat_size": 8})
