"""The formulas of `mpitp plan memory` are within 3 % of what runs of these layouts really hold."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest

from mpitp.backend.device import CpuDevice
from mpitp.cli import main
from mpitp.comm import Group, SerialGroup, run_threads
from mpitp.config import RunConfig, run_config_from
from mpitp.errors import ConfigError
from mpitp.layers.layer import Layer
from mpitp.layers.rows import Rows
from mpitp.layers.site import make_site
from mpitp.models import registry
from mpitp.models.layered import LayeredModel
from mpitp.pipeline import runner as pipeline
from mpitp.plan.kept import Sizes, kept_of
from mpitp.plan.memory_command import run_memory, table
from mpitp.plan.work import Sequences, work_of
from mpitp.step.contents import arrays_in
from mpitp.train.loop import TrainLoop
from mpitp.train.run import train
from mpitp.train.stop import StopSignals
from tests.train.run_case import make_data

GPT2 = {"model_type": "gpt2", "n_embd": 48, "n_head": 6, "n_layer": 4, "n_positions": 32, "vocab_size": 301}
LLAMA = {
    "model_type": "llama", "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 301,
    "num_hidden_layers": 4, "intermediate_size": 130, "max_position_embeddings": 32, "tie_word_embeddings": True,
}  # fmt: skip
MOE = {
    **LLAMA, "model_type": "qwen2_moe", "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 70, "mlp_only_layers": [1], "output_router_logits": True,
}  # fmt: skip
KINDS = {"moe": MOE, "gpt2": GPT2, "llama": LLAMA, "olmo2": {**LLAMA, "model_type": "olmo2"}}
KINDS["qwen3"] = {**LLAMA, "model_type": "qwen3", "head_dim": 8}

LAYOUTS: list[tuple[int, str, dict[str, Any]]] = [  # ranks, model, changes of the run file
    (1, "gpt2", {}),
    (1, "llama", {"train.recompute": "full"}),
    (1, "gpt2", {"train.recompute": "attention", "model.dtype": "bfloat16"}),
    (3, "llama", {"train.recompute": "every:2"}),
    (2, "gpt2", {"mesh.sequence_parallel": True, "model.dtype": "float16"}),
    (3, "qwen3", {"mesh.sequence_parallel": True}),
    (3, "olmo2", {"mesh.sequence_parallel": True}),
    (1, "moe", {}),
    (2, "moe", {"mesh.sequence_parallel": True}),
    (2, "llama", {"mesh.dp": 2}),
    (4, "gpt2", {"mesh.dp": 2, "optim.zero": 1, "model.dtype": "bfloat16"}),
    (2, "llama", {"mesh.dp": 2, "optim.zero": 2}),
    (2, "gpt2", {"mesh.dp": 2, "optim.zero": 3, "model.dtype": "bfloat16"}),
    (2, "llama", {"mesh.cp": 2}),
    (2, "llama", {"mesh.cp": 2, "mesh.cp_form": "heads"}),
    (2, "gpt2", {"mesh.pp": 2}),
    (2, "gpt2", {"mesh.pp": 2, "mesh.schedule": "gpipe", "train.recompute": "full"}),
    (2, "llama", {"mesh.pp": 2, "mesh.schedule": "interleaved"}),
    (2, "llama", {"mesh.pp": 2, "mesh.schedule": "zb"}),
    (2, "llama", {"mesh.shares": [2, 1], "mesh.sequence_parallel": True}),
    (4, "gpt2", {"mesh.pp": 2, "mesh.dp": 2, "mesh.shares": {"pp": [3, 1], "dp": [1, 1.01]}}),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("memory"))


def config_of(data: Path, run_dir: Path, kind: str, changes: dict[str, Any]) -> RunConfig:
    tables: dict[str, dict[str, Any]] = {
        "model": dict(KINDS[kind]),
        "data": {"train": str(data / "train"), "seq_len": 32},
        "mesh": {},
        "task": {},
        "train": {"steps": 1, "micro_batch_size": 2, "global_batch_size": 8, "run_dir": str(run_dir)},
        "optim": {"bucket_mib": 0.05},
    }
    for name, value in changes.items():
        section, key = name.split(".")
        tables[section][key] = value
    return run_config_from(tables)


def held(values: Iterable[Any]) -> int:
    """Bytes of the distinct arrays in some contexts."""
    owners = {}
    for array in arrays_in(list(values)):
        while isinstance(array.base, np.ndarray):
            array = array.base
        owners[id(array)] = array.nbytes
    return sum(owners.values())


def _cells(task: Any) -> list[Any]:
    """What a task that was put off holds, through the functions that it calls too."""
    inner = [cell.cell_contents for cell in task.__closure__ or ()]
    return inner + [cell for each in inner if isinstance(each, FunctionType) for cell in _cells(each)]


class Watch:
    """What one rank holds: after every forward, before the update, and at the end."""

    def __init__(self, loop: TrainLoop) -> None:
        self.loop, self.activations, self.gradients = loop, 0, 0
        norm = loop.train_step.grad_norm
        params = [param for _, param in loop.train_step.reduction.params]

        def counted() -> float:
            self.gradients = sum(param.grad.nbytes for param in params if param.grad is not None)
            return norm()

        loop.train_step.grad_norm = counted  # type: ignore[assignment]

    def saw(self, contexts: Iterable[Any]) -> None:
        self.activations = max(self.activations, held(contexts))

    def found(self) -> dict[str, int]:
        optimizer = self.loop.optimizer
        moments = sum(m.nbytes + v.nbytes for m, v in optimizer.moments.values())
        return {
            "weights": sum(param.data.nbytes for _, param in self.loop.model.named_params()),
            "gradients": self.gradients,
            "optimizer": moments + sum(master.nbytes for master in optimizer.masters.values()),
            "activations": self.activations,
        }


def measured(config: RunConfig, ranks: int, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    watches: dict[int, Watch] = {}
    backward, forward, input_grad = LayeredModel.loss_backward, pipeline._Walk._forward, pipeline._Walk._input_grad

    def plain(self: LayeredModel, ctx: Any, *rest: Any) -> None:
        watches[id(self)].saw([ctx])
        backward(self, ctx, *rest)

    def staged(self: Any, action: Any) -> None:
        forward(self, action)
        look(self)

    def halved(self: Any, action: Any) -> None:
        input_grad(self, action)
        look(self)

    def look(self: Any) -> None:
        cells = [cell for tasks in self.put_off.values() for task in tasks for cell in _cells(task)]
        put_off = [cell for cell in cells if isinstance(cell, np.ndarray)]
        watches[id(self.model)].saw([[each.ctxs, each.loss] for each in self.held.values()] + put_off)

    monkeypatch.setattr(LayeredModel, "loss_backward", plain)
    monkeypatch.setattr(pipeline._Walk, "_forward", staged)
    monkeypatch.setattr(pipeline._Walk, "_input_grad", halved)

    def rank(group: Group) -> dict[str, int]:
        own: list[Watch] = []

        def observe(loop: TrainLoop) -> None:
            own.append(Watch(loop))
            watches[id(loop.model)] = own[0]

        train(config, group, CpuDevice(), stop=StopSignals(()), observe=observe)
        return own[0].found()

    return run_threads(ranks, rank)


@pytest.mark.parametrize(("ranks", "kind", "changes"), LAYOUTS, ids=str)
def test_formulas_are_what_a_run_holds(
    ranks: int, kind: str, changes: dict[str, Any], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(data, tmp_path / "run", kind, changes)
    foreseen = run_memory(config, ranks)
    for memory, found in zip(foreseen, measured(config, ranks, monkeypatch), strict=True):
        if config.optim.zero == 1:  # whole until they are scattered, which is before the norm
            found["gradients"] = memory.gradients
        expected = {name: getattr(memory, name) for name in found}
        assert expected == pytest.approx(found, rel=0.03)


def test_thousands_of_ranks_without_text_or_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Seventy billion parameters over 64 ranks: told in seconds, by a table and by numbers that add up."""
    sizes = {"hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 80}
    fields = {**LLAMA, **sizes, "intermediate_size": 28672, "vocab_size": 32000, "max_position_embeddings": 4096}
    fields["tie_word_embeddings"] = False
    lines = ["[model]", *(f"{key} = {json.dumps(value)}" for key, value in fields.items()), 'dtype = "bfloat16"']
    lines += ["[data]", 'train = "/nowhere"', "seq_len = 4096", "[mesh]", "tp = 8", "pp = 4", "dp = 2"]
    lines += ["[train]", "steps = 1", f'run_dir = "{tmp_path}/run"', "global_batch_size = 64", 'recompute = "full"']
    path = tmp_path / "run.toml"
    path.write_text("\n".join([*lines, "[optim]", "zero = 1"]) + "\n")
    assert main(["plan", "memory", str(path), "--ranks", "64", "--json"]) == 0
    ranks = json.loads(capsys.readouterr().out)
    weights = sum(rank["weights"] for rank in ranks if not rank["coordinates"]["dp"])
    assert weights == pytest.approx(2 * 69e9, rel=0.01)
    assert sum(rank["optimizer"] for rank in ranks) == pytest.approx(12 * 69e9, rel=0.01)
    assert all(
        rank["total"]
        == sum(rank[k] for k in ("weights", "gradients", "optimizer", "activations", "recomputed", "buffers"))
        for rank in ranks
    )
    assert main(["plan", "memory", str(path), "--ranks", "64"]) == 0
    assert "the largest rank" in capsys.readouterr().out


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_replicas_share_one_count(zero: int, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model is made once for each place beside the replicas, however many these are; parts add up to the whole."""
    made = []
    make = registry.abstract_model
    monkeypatch.setattr(registry, "abstract_model", lambda *args: made.append(args) or make(*args))
    changes = {"mesh.dp": 700, "mesh.tp": 3, "optim.zero": zero}
    ranks = run_memory(config_of(data, tmp_path / "run", "llama", changes), 2100)
    assert len(made) <= 3 and len(ranks) == 2100
    plain = run_memory(config_of(data, tmp_path / "run", "llama", {"mesh.dp": 1, "mesh.tp": 3}), 3)
    assert sum(rank.optimizer for rank in ranks) == sum(rank.optimizer for rank in plain)
    assert [rank.coordinates for rank in ranks[3:5]] == [{"dp": 1, "tp": 0}, {"dp": 1, "tp": 1}]


def test_what_cannot_be_told(data: Path, tmp_path: Path) -> None:
    class Unheard(Layer):
        forward = backward = placements = None  # type: ignore[assignment]

        def children(self) -> dict[str, Any]:
            return {}

    with pytest.raises(ConfigError, match="no formula for what a Unheard keeps"):
        kept_of(Unheard(), Sizes(1, 1, 1, 1, 4, 4, False))  # type: ignore[abstract]
    with pytest.raises(ConfigError, match="can't go together"):
        run_memory(config_of(data, tmp_path / "run", "gpt2", {"mesh.cp": 2, "train.invariant": True}), 2)
    with pytest.raises(ConfigError, match="mesh.dp = 2"):
        run_memory(config_of(data, tmp_path / "run", "gpt2", {"mesh.dp": 2}), 3)
    with pytest.raises(ConfigError, match="need at least 2 for each replica"):  # as `mpitp train` would
        run_memory(config_of(data, tmp_path / "run", "gpt2", {"mesh.pp": 2, "mesh.dp": 4}), 8)
    assert len(table(*(lambda c: (c, run_memory(c, 2)))(config_of(data, tmp_path / "run", "gpt2", {})))) > 4


def test_the_time_of_experts_is_that_of_the_rows_they_get() -> None:
    """Of k t rows, three products of gate, up and down each; and of all rows in the router and the shared expert."""
    site = make_site(SerialGroup())
    mixture = registry.abstract_model(registry.config_from_hf(MOE), site)["blocks.0.mlp"]
    work = work_of(mixture, Sizes.of(Rows.of([16]), site, 48), Sequences(16))
    t, h, k = 16, 48, 2
    products = 2 * t * h * (k * 3 * 40 + 3 * 70 + 5 + 1)  # the chosen experts, the shared one, router and gate
    assert [part.flops for part in (work.forward, work.input_grad, work.weight_grad)] == [products] * 3
    assert work.forward.exps == t * (k * 40 + 70 + 5)
