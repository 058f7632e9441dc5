"""The decoders that came after GPT-2, Llama and Qwen2 against PyTorch and transformers, on 1 to 7 thread ranks: logits,
losses, every gradient, ten training losses, a continuation through the cache, and a round trip through saved files.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mpitp.checkpoint import load_model
from mpitp.checkpoint.hf import Documents, save_model
from mpitp.checkpoint.hf_directory import HfWeights, read_config
from mpitp.comm import Group, run_threads
from mpitp.layers.site import make_site
from tests.parity.golden_case import (
    GOLDEN,
    LATER_DECODERS,
    Differences,
    Golden,
    compare,
    compare_training,
    golden_arrays,
    greedy,
    largest,
)

TOLERANCE, TRAINING_TOLERANCE = 1e-12, 2e-10  # as in test_golden.py


def whole_case(group: Group, directory: Path, golden: Golden) -> tuple[Differences, list[int]]:
    """All that is compared."""
    differences = compare(group, directory, golden) | compare_training(group, directory, golden)
    return differences, greedy(group, directory, golden) if "greedy" in golden else []


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("case", LATER_DECODERS)
def test_everything(case: str, ranks: int) -> None:
    golden = golden_arrays(case)
    for differences, tokens in run_threads(ranks, whole_case, GOLDEN / case, golden):
        print(f"{case} on {ranks}: {largest(differences)}")
        most = {name: TRAINING_TOLERANCE if "training" in name else TOLERANCE for name in differences}
        assert {name: value for name, value in differences.items() if not value < most[name]} == {}
        assert tokens == golden["greedy"].tolist() if "greedy" in golden else not tokens


@pytest.mark.parametrize("case", LATER_DECODERS)
def test_what_is_saved_is_what_was_read(case: str, tmp_path: Path) -> None:
    """The same tensors under the same names, fused and interleaved ones too, whatever the number of ranks."""

    def save(group: Group) -> None:
        model = load_model(GOLDEN / case, make_site(group))
        save_model(model, tmp_path / "saved", group, Documents(read_config(GOLDEN / case)))

    run_threads(3, save)
    with HfWeights(GOLDEN / case) as before, HfWeights(tmp_path / "saved") as after:
        assert before.shapes() == after.shapes()
        for name, shape in before.shapes().items():
            arrays = [np.empty(shape, np.float32) for _ in range(2)]
            before.read(name, arrays[0], [0] * len(shape))
            after.read(name, arrays[1], [0] * len(shape))
            np.testing.assert_array_equal(*arrays, err_msg=name)
