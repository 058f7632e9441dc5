"""Makes mixtures of experts on a site: shares of experts and of their columns become placements of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpitp.layers.activation import activation_of
from mpitp.layers.build import Builder
from mpitp.layers.exchange import Exchange, ExchangeOverEp, StayHere
from mpitp.layers.expert_matrices import DenseMatrices, ExpertMatrices, groupwise_matrices
from mpitp.layers.experts import ExpertPairs, Experts, ExpertSizes
from mpitp.layers.mixture import MixtureOfExperts, SharedExpert
from mpitp.layers.placement import Cut, Part
from mpitp.layers.product import DenseProduct
from mpitp.layers.router import Router, Routing, TokenSum
from mpitp.layers.shards import ranks_along
from mpitp.layers.site import Site


@dataclass(frozen=True, slots=True)
class MixtureSizes:
    """What a mixture is like, whatever rank it is on. `shared`: columns of the shared expert, 0: there is none."""

    hidden: int
    width: int  # columns of an expert
    experts: ExpertSizes
    shared: int = 0
    activation: str = "silu"


def build_mixture(build: Builder, sizes: MixtureSizes, routing: Routing) -> MixtureOfExperts:
    """Router, experts and shared expert."""
    site, count = build.site, sizes.experts.num_experts
    token_sum = _token_sum(site)
    weight = build.between(count, sizes.hidden, std=build.init_std)
    router = Router(DenseProduct(weight), routing, token_sum)
    gate_up = _experts(build, ("gate", "up"), sizes, down=False)
    down = _experts(build, ("down",), sizes, down=True)
    pairs = ExpertPairs(build.entry(), build.entry(), _exchange(site, count), build.exit(site.summation()))
    inner = activation_of(sizes.activation, gated=True)
    experts = Experts(gate_up, down, inner, pairs, sizes.experts)
    return MixtureOfExperts(router, experts, _shared(build, sizes) if sizes.shared else None)


def _token_sum(site: Site) -> TokenSum:
    axes = site.token_axes
    wide = [axis for axis in axes if site.mesh.sizes[axis] > 1]
    return TokenSum(ranks_along(site.mesh, axes), axes, wide[0] if wide else "tp")


def _experts(build: Builder, names: Sequence[str], sizes: MixtureSizes, *, down: bool) -> ExpertMatrices:
    """All own experts' matrices in one array, [e/ep, f/tp, h] a name, or [e/ep, h, f/tp] when `down`."""
    site, hidden = build.site, Cut.whole(sizes.hidden)
    experts = Cut.of(site.share(sizes.experts.num_experts, "ep"), "ep")
    columns = Cut.of(build.columns(sizes.width))
    parts = [Part(name, (experts, hidden, columns) if down else (experts, columns, hidden)) for name in names]
    placement = site.placement(parts, fused=2 if down else 1)
    if build.grouping is not None:
        return groupwise_matrices(site, placement, build.grouping)
    return DenseMatrices(site.param(placement, std=build.init_std, decay=True))


def _exchange(site: Site, num_experts: int) -> Exchange:
    group = site.mesh["ep"]
    if group.size == 1:
        return StayHere()
    return ExchangeOverEp.over(group, num_experts, site.mesh.weights("ep"))


def _shared(build: Builder, sizes: MixtureSizes) -> SharedExpert:
    gate = build.between(1, sizes.hidden, std=build.init_std)
    share = build.columns(sizes.shared)
    mlp = build.mlp(sizes.hidden, share, gated=True, bias=False, activation=sizes.activation)
    return SharedExpert(DenseProduct(gate), mlp)
