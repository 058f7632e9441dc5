"""Parameters that two axes of a mesh cut: initial values, files, owners and the gradient norm follow the placement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from mpitp.checkpoint.hf import Documents, load_params, save_model
from mpitp.comm import Group, make_mesh, run_threads
from mpitp.layers import Cut, Param, Part, Site, make_site
from mpitp.layers.init import init_params
from mpitp.models.names import HfPiece
from mpitp.optim.grad_norm import GradNorm
from tests.sharded import assemble, assert_same_bits

EXPERTS, COLUMNS, WIDTH = 5, 7, 3
AXES = {"ep": 2, "tp": 2}


class Experts:
    """Two fused matrices a expert [e, 2 f, h]: experts over ep, columns over tp; and a bias that nobody cuts."""

    def __init__(self, site: Site) -> None:
        experts, columns = Cut.of(site.share(EXPERTS, "ep"), "ep"), Cut.of(site.share(COLUMNS))
        parts = [Part(name, (experts, columns, Cut.whole(WIDTH))) for name in ("gate", "up")]
        self.params = {
            "experts": site.param(site.placement(parts, fused=1), std=0.5),
            "bias": site.whole(WIDTH, value=2.0),
        }

    def named_params(self) -> Iterator[tuple[str, Param]]:
        yield from self.params.items()

    def hf_pieces(self) -> Mapping[tuple[str, str], HfPiece]:
        fused = {("experts", name): HfPiece("w", i * COLUMNS, 2 * COLUMNS) for i, name in enumerate(("gate", "up"))}
        return {**fused, ("bias", ""): HfPiece("b")}


def whole(group: Group, model: Experts, attribute: str = "data") -> dict[str, np.ndarray]:
    named = model.named_params()
    return assemble(group, [(name, param.placement, getattr(param, attribute)) for name, param in named])


def run(world: Group, folder: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], float]:
    """Initial values; those that come back from the files; the norm of what is taken for their gradients."""
    site = make_site(make_mesh(world, AXES if world.size == 4 else {"ep": world.size, "tp": 1}))
    model, other = Experts(site), Experts(site)
    init_params(model.named_params(), seed=3)
    save_model(model, folder, world, Documents({}))  # type: ignore[arg-type]
    load_params(other, folder)  # type: ignore[arg-type]
    for param in model.params.values():
        param.grad = param.data
    return whole(world, model), whole(world, other), GradNorm(model.named_params(), site.ranks)()


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_two_axes_equal_one_rank(ranks: int, tmp_path: Path) -> None:
    ((expected, loaded, norm),) = run_threads(1, run, tmp_path / "one")
    assert_same_bits(loaded, expected)
    everything = np.concatenate([array.reshape(-1) for array in expected.values()]).astype(np.float64)
    assert norm == pytest.approx(float(np.linalg.norm(everything)), rel=1e-6)
    for found, back, found_norm in run_threads(ranks, run, tmp_path / "many"):
        assert_same_bits(found, expected)
        assert_same_bits(back, expected)
        assert found_norm == pytest.approx(norm, rel=1e-7)
    files = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("one", "many")]
    assert files[0] == files[1]


def test_what_one_of_four_ranks_has() -> None:
    def shapes(world: Group) -> tuple[tuple[int, ...], list[str], bool]:
        model = Experts(make_site(make_mesh(world, AXES)))
        experts, bias = model.params["experts"].placement, model.params["bias"].placement
        assert experts.axes == {"ep", "tp"} and not experts.partial and bias.partial == {"ep"}
        return experts.shape, sorted(experts.axes), bias.is_owner

    assert run_threads(4, shapes) == [
        ((3, 8, 3), ["ep", "tp"], True),
        ((3, 6, 3), ["ep", "tp"], False),
        ((2, 8, 3), ["ep", "tp"], False),
        ((2, 6, 3), ["ep", "tp"], False),
    ]
