"""What a config says of a mixture of experts, whatever its type calls it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mpitp.errors import ConfigError
from mpitp.layers.balance import BalanceRule
from mpitp.layers.build import Builder
from mpitp.layers.site import Site
from mpitp.models.config import HfConfigReader
from mpitp.models.names import HfPiece

if TYPE_CHECKING:
    from mpitp.layers.mixture import MixtureOfExperts


@dataclass(frozen=True, slots=True)
class Mixture:
    """Blocks whose MLP is a mixture of experts.

    width: columns of an expert. shared: of the expert that every token goes through (0: none). normed: whether a
    token's scores are made to add up to 1. coef, z_coef: what the auxiliary losses weigh. capacity: the factor of an
    even share of rows beyond which an expert takes none (0: it takes all).
    """

    num_experts: int
    top_k: int
    width: int
    blocks: tuple[int, ...]
    shared: int = 0
    normed: bool = True
    coef: float = 0.0
    z_coef: float = 0.0
    capacity: float = 0.0

    @property
    def balance_rule(self) -> BalanceRule | None:
        """Of its auxiliary losses; None where none counts."""
        return BalanceRule(self.num_experts, self.coef, self.z_coef) if self.coef or self.z_coef else None

    def check(self, site: Site) -> None:
        """Raise ConfigError for a site on which it can't be right."""
        if site.num_blocks:
            raise ConfigError(
                "invariant mode has no mixture of experts: how many rows an expert's product has is up to the routing, "
                "and products of one row round by how the columns are dealt; train without (train.invariant = false)"
            )
        if self.capacity and site.mesh.sizes["cp"] > 1:
            raise ConfigError(
                f"expert_capacity_factor={self.capacity} needs the rows of whole microbatches in their order, and with "
                "mesh.cp each rank has a piece of every sequence; set one of the two to its default (0, and mesh.cp 1)"
            )

    def of_blocks(self, blocks: range) -> Mixture:
        """That of a model of these blocks alone."""
        return replace(self, blocks=tuple(block - blocks.start for block in self.blocks if block in blocks))

    def build(self, build: Builder, hidden: int, activation: str, index: int) -> MixtureOfExperts:
        """The mixture of block `index`, its parameters still zero."""
        from mpitp.layers.build_mixture import MixtureSizes, build_mixture
        from mpitp.layers.experts import ExpertSizes
        from mpitp.layers.router import Routing

        shards = build.site.tp.size if build.site.sequence_parallel else 1
        experts = ExpertSizes(self.num_experts, self.top_k, self.capacity, shards)
        sizes = MixtureSizes(hidden, self.width, experts, self.shared, activation)
        return build_mixture(build, sizes, Routing(f"blocks.{index}", self.top_k, self.normed))


def check_choice(read: HfConfigReader, keys: tuple[str, str]) -> tuple[int, int]:
    """The numbers of experts, and of those that a token goes to. `keys`: what the file calls them."""
    of_all, of_token = keys
    num_experts, top_k = read.integer(of_all), read.integer(of_token)
    for key, value in ((of_all, num_experts), (of_token, top_k)):
        if value < 1:
            raise ConfigError(f"config.json: {key} must be at least 1, got {value}")
    if top_k > num_experts:
        raise ConfigError(
            f"config.json: {of_token}={top_k} exceeds {of_all}={num_experts}: a token can't go to more experts than "
            f"there are; lower {of_token}"
        )
    return num_experts, top_k


def read_losses(read: HfConfigReader, coef: float) -> dict[str, Any]:
    """What the auxiliary losses weigh, and the capacity. The balancing loss counts where `output_router_logits` says
    so, as in the reference (`coef`: its default); z-loss and capacity are keys of mpitp's own.
    """
    weighs, given = read.flag("output_router_logits", False), read.number("router_aux_loss_coef", coef)
    found = {"coef": given if weighs else 0.0}
    found |= {"z_coef": read.number("router_z_loss_coef", 0.0), "capacity": read.number("expert_capacity_factor", 0.0)}
    for key, value in (("router_aux_loss_coef", given), *found.items()):
        if value < 0:
            name = {"z_coef": "router_z_loss_coef", "capacity": "expert_capacity_factor"}.get(key, key)
            raise ConfigError(f"config.json: {name} must be at least 0, got {value}")
    return found


def expert_pieces(ours: str, theirs: str, num_experts: int, words: Sequence[str]) -> dict[tuple[str, str], HfPiece]:
    """The experts of a block, each matrix in a tensor of its own. `words`: what gate, up and down are called."""
    names = {
        part: f"{theirs}.experts.{{}}.{word}.weight" for part, word in zip(("gate", "up", "down"), words, strict=True)
    }
    param = {"gate": "gate_up", "up": "gate_up", "down": "down"}
    return {
        (f"{ours}.mlp.experts.{param[part]}", part): HfPiece(name, stacked=num_experts) for part, name in names.items()
    }
