"""No two dropouts of a model share the name of their masks: shared ones would drop the same elements in two places."""

from __future__ import annotations

import dataclasses

import pytest

from mpitp.comm import SerialGroup
from mpitp.layers import Dropout, make_site, walk
from mpitp.layers.attention import AttentionHeads
from mpitp.models import CausalLM, abstract_model
from mpitp.models.config import Dropouts
from tests.models.model_cases import CONFIGS


def mask_names(model: CausalLM) -> list[str]:
    layers = [layer for _, layer in walk(model.all_layers())]
    names = [layer.name for layer in layers if isinstance(layer, Dropout)]
    return names + [layer.dropout.name for layer in layers if isinstance(layer, AttentionHeads)]


@pytest.mark.parametrize("name", CONFIGS)
def test_names_are_distinct(name: str) -> None:
    config = dataclasses.replace(CONFIGS[name], dropouts=Dropouts(0.1, 0.2, 0.3))
    names = mask_names(abstract_model(config, make_site(SerialGroup())))
    assert len(names) == 1 + 3 * config.num_layers
    assert len(set(names)) == len(names)
