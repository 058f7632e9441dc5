"""Mistral (Jiang et al. 2023): a Llama all of whose blocks see a window of the newest positions only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpitp.models.config import DecoderConfig, HfConfigReader
from mpitp.models.facts import Defaults, finished, with_traits
from mpitp.models.llama import llama_facts
from mpitp.models.windows import SLIDING, read_window, windows_of

_DEFAULTS = Defaults(max_positions=131072, norm_eps=1e-6, tied=False, kv_heads=8)


def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """The config of a Mistral directory. Raises ConfigError for what is missing, unknown or not supported."""
    read = HfConfigReader(raw)
    facts = llama_facts(read, _DEFAULTS)
    window, num_layers = read_window(read, 4096), facts["num_layers"]
    kinds = [SLIDING] * num_layers if window is not None else []
    windows = windows_of(kinds, window, num_layers, facts["max_positions"])
    return finished(read, DecoderConfig(**with_traits(facts, windows=windows)))
