"""Runs through a pipeline equal runs on one rank: every schedule, cut by cost and by hand, beside tp and dp."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from mpitp.comm import abstract_mesh
from mpitp.config import RunConfig
from mpitp.errors import ConfigError
from mpitp.train.setup import model_config, open_data
from mpitp.train.stages import check_pipeline
from tests.sharded import assert_same_bits
from tests.train.layouts import check_layout, found_in, layout_config, new_folder, scratch
from tests.train.run_case import run

DEEP = {"model_n_layer": 4}
LAYOUTS: list[tuple[int, dict[str, Any], dict[str, Any]]] = [  # ranks, [mesh], what both runs have
    (2, {"pp": 2, "schedule": "gpipe"}, {}),
    (2, {"pp": 2}, {}),
    (2, {"pp": 2, "schedule": "zb", "stages": [2, 0]}, {}),
    (3, {"pp": 3, "schedule": "zb", "stages": [0, 2, 2]}, DEEP),
    (2, {"pp": 2, "schedule": "interleaved"}, {**DEEP, "train_global_batch_size": 6}),
    (4, {"pp": 4, "schedule": "1f1b"}, {**DEEP, "model": "gpt2 untied"}),
    (4, {"pp": 2, "tp": 2}, {"model": "llama biases, tied, 5/1, llama3"}),
    (4, {"pp": 2, "tp": 2, "schedule": "zb", "sequence_parallel": True}, {"model": "llama 9/3"}),
    (4, {"pp": 2, "dp": 2}, {}),
    (8, {"pp": 2, "dp": 2, "tp": 2, "schedule": "zb"}, {"model": "qwen2 6/2, tied"}),
    (
        4,
        {"pp": 2, "dp": 2, "schedule": "interleaved", "stages": [1, 1, 1, 0]},
        {"model": "llama 9/3", "model_num_hidden_layers": 3, "train_global_batch_size": 8},
    ),
]


@pytest.mark.parametrize("zero", [1, 2])
def test_a_pipeline_whose_replicas_deal_their_state(zero: int) -> None:
    check_layout(4, {"pp": 2, "dp": 2}, {"optim_zero": zero})


@pytest.mark.parametrize(("ranks", "mesh", "same"), LAYOUTS, ids=str)
def test_a_pipeline_equals_one_rank(ranks: int, mesh: dict[str, Any], same: dict[str, Any]) -> None:
    check_layout(ranks, mesh, **same)


INVARIANT: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (2, {"pp": 2}, {}),
    (4, {"pp": 2, "tp": 2, "schedule": "gpipe"}, {"model": "llama biases, tied, 5/1, llama3"}),
    (4, {"pp": 2, "dp": 2, "schedule": "zb"}, {}),
    (
        2,
        {"pp": 2, "schedule": "interleaved"},
        {"model": "gpt2 untied", "model_n_layer": 4, "train_global_batch_size": 6},
    ),
]


@pytest.mark.parametrize(("ranks", "mesh", "same"), INVARIANT, ids=str)
def test_the_invariant_mode_gives_the_bits_of_one_rank(ranks: int, mesh: dict[str, Any], same: dict[str, Any]) -> None:
    layout = {"optim_zero": 1} if "dp" in mesh else {}
    check_layout(ranks, mesh, layout, tolerance=0, train_invariant=True, model_dtype="float32", **same)


@pytest.mark.parametrize("first", ["pp", "tp"])
def test_a_run_goes_on_in_another_layout(first: str) -> None:
    """Two steps in one layout and one in another are three in either, in the invariant mode to the bit."""
    same = {"model": "gpt2", "train_invariant": True, "train_steps": 3, "checkpoint_every": 2, "checkpoint_keep": 9}
    meshes = [{"pp": 2, "schedule": "zb"}, {"tp": 2}]
    folder, whole = new_folder(), layout_config(scratch(), new_folder(), {}, **same)
    run(1, whole)
    for mesh in meshes if first == "pp" else meshes[::-1]:
        settings = layout_config(scratch(), folder, mesh, **same)
        for later in (folder / "checkpoints").glob("step-*3"):
            shutil.rmtree(later)
        run(2, settings, resume="auto")
    assert_same_bits(found_in(settings), found_in(whole))


def refusal(mesh: dict[str, Any], **same: Any) -> str:
    """What is said before anything is computed about a run file whose pipeline can't be."""

    def check(settings: RunConfig) -> None:
        sizes = {axis: mesh.get(axis, 1) for axis in ("pp", "dp", "tp")}
        check_pipeline(settings, model_config(settings, open_data(settings)), abstract_mesh(sizes))

    with pytest.raises(ConfigError) as error:
        check(layout_config(scratch(), new_folder(), mesh, **same))
    return str(error.value)


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"pp": 2, "dp": 2, "schedule": "zb"}, {"optim_zero": 3}, "optim.zero = 3 beside mesh.schedule = zb: weight gradi"),
    (
        {"pp": 2, "dp": 2},
        {"optim_zero": 3},
        "5 microbatches a step, but optim.zero = 3 beside mesh.pp = 2 needs as many on each of mesh.dp = 2 replicas; "
        "train.global_batch_size = 4 or 6, or optim.zero = 2 would do",
    ),
    ({"pp": 3}, {}, "mesh.pp = 3 stages of at least one block each, but the model has 2; use mesh.pp = 2 or fewer"),
    (
        {"pp": 2},
        {"train_global_batch_size": 3, "train_micro_batch_size": 3},
        "train.global_batch_size=3 in microbatches of 3 is 1 microbatch a step, but mesh.pp = 2 stages need at least "
        "2, or some would never be busy with the others; train.micro_batch_size = 2 or train.global_batch_size = 6 or "
        "mesh.pp = 1 would do",
    ),
    (
        {"pp": 2, "dp": 3},
        {"train_global_batch_size": 5},
        "5 microbatches a step, but mesh.pp = 2 stages need at least 2 for each replica, or some would never be busy "
        "with the others; train.global_batch_size = 6 or mesh.pp = 1 would do",
    ),
    (
        {"pp": 2, "schedule": "interleaved"},
        {"model_n_layer": 4},
        "5 microbatches a step, but schedule interleaved takes them in rounds of mesh.pp = 2: 5 = 2 x 2 + 1; "
        'train.global_batch_size = 4 or 6, or mesh.schedule = "1f1b"',
    ),
    (
        {"pp": 2, "schedule": "interleaved"},
        {},
        "2 stages x mesh.chunks = 2 = 4 parts of at least one block each, but the",
    ),
    ({"pp": 2, "stages": [1, 2]}, {}, "mesh.stages = [1, 2]: 1 + 2 = 3 blocks, the model has 2"),
    (
        {"pp": 2, "chunks": 2},
        {},
        'mesh.chunks = 2 with mesh.schedule = "1f1b": a stage has several parts of the model when',
    ),
    ({"stages": [1, 1]}, {}, "mesh.stages = [1, 1] cuts the model into parts, but mesh.pp = 1"),
    ({"pp": 2, "stages": [1, -1]}, {}, "mesh.stages = [1, -1]: expected a list of whole numbers of at least 0 each"),
    ({"pp": 2, "schedule": "1b1f"}, {}, 'mesh.schedule = "1b1f": expected'),
]


@pytest.mark.parametrize(("mesh", "same", "words"), REFUSED, ids=str)
def test_pipelines_that_cannot_be(mesh: dict[str, Any], same: dict[str, Any], words: str) -> None:
    assert words in refusal(mesh, **same)
