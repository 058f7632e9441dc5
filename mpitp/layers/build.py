"""Makes parallel layers for one layout, dtype and device: the only place where shares become parameter shapes.

Parameters come out zero; loading or `layers/init.py` fills them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpitp.backend.arrays import aligned_zeros
from mpitp.backend.device import Device
from mpitp.layers.attention import AttentionDropout, SelfAttention
from mpitp.layers.layout import Layout
from mpitp.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpitp.layers.mappings import CopyToTP, ReduceFromTP
from mpitp.layers.norm import LayerNorm, RMSNorm
from mpitp.layers.param import Param, Part, ShardSpec, replicated
from mpitp.layers.partition import HeadShare, Share


@dataclass(frozen=True, slots=True)
class Builder:
    """Layers of one model: its layout over the ranks, the dtype and device of its parameters, the scale of its init."""

    layout: Layout
    device: Device
    dtype: Any
    init_std: float

    def param(self, spec: ShardSpec, *, std: float = 0.0, value: float = 0.0, decay: bool = False) -> Param:
        """A parameter of zeros with the given spec."""
        return Param(aligned_zeros(spec.shape, self.dtype, self.device.xp), spec, std, value, decay)

    def matrix(self, parts: Sequence[Part], other: int, dim: int, std: float | None = None) -> Param:
        """A weight cut along `dim` into `parts`, `other` wide along its other dim."""
        cut = sum(len(part.held) for part in parts)
        shape = (cut, other) if dim == 0 else (other, cut)
        return self.param(ShardSpec(shape, dim, tuple(parts)), std=self.init_std if std is None else std, decay=True)

    def replicated(self, size: int, value: float = 0.0) -> Param:
        """A vector that every rank holds."""
        return self.param(replicated("", (size,), self.layout.group.rank), value=value)

    def replicated_matrix(self, rows: int, cols: int) -> Param:
        """A matrix that every rank holds."""
        return self.param(replicated("", (rows, cols), self.layout.group.rank), std=self.init_std, decay=True)

    def layer_norm(self, hidden: int, eps: float) -> LayerNorm:
        """LayerNorm over `hidden` columns."""
        return LayerNorm(self.replicated(hidden, 1.0), self.replicated(hidden), eps)

    def rms_norm(self, hidden: int, eps: float) -> RMSNorm:
        """RMSNorm over `hidden` columns."""
        return RMSNorm(self.replicated(hidden, 1.0), eps)

    def column(self, names: Sequence[str], width: int, share: Share, *, bias: bool) -> ColumnParallelLinear:
        """Column-parallel linear from `width` to len(names) * share.units outputs: one part a name, all cut alike."""
        parts = [sharded(name, share) for name in names]
        # One product for all parts, unless blocks are multiplied one by one: then part after part within a block.
        blocks = [
            range(block.start + i * share.size, block.stop + i * share.size)
            for block in share.local_blocks
            for i in range(len(names))
        ]
        if not self.layout.num_blocks:
            blocks = [range(len(names) * share.size)]
        return self.column_from(parts, width, blocks, None, bias=bias)

    def column_from(
        self,
        parts: Sequence[Part],
        width: int,
        blocks: Sequence[range],
        dx_blocks: Sequence[range] | None,
        *,
        bias: bool,
    ) -> ColumnParallelLinear:
        """Column-parallel linear with explicit parts and blocks."""
        weight = self.matrix(parts, width, dim=0)
        bias_param = self.param(ShardSpec((weight.data.shape[0],), 0, tuple(parts))) if bias else None
        return ColumnParallelLinear(weight, bias_param, CopyToTP(self.layout.summation), blocks, dx_blocks)

    def row(self, name: str, share: Share, width: int, *, bias: bool, std: float | None = None) -> RowParallelLinear:
        """Row-parallel linear from share.units inputs to `width` outputs."""
        weight = self.matrix([sharded(name, share)], width, dim=1, std=std)
        bias_param = self.replicated(width) if bias else None
        return RowParallelLinear(weight, bias_param, ReduceFromTP(self.layout.summation), share.local_blocks)

    def attention(
        self,
        heads: HeadShare,
        head_dim: int,
        hidden: int,
        dropout: AttentionDropout,
        *,
        qkv_bias: bool,
        out_bias: bool,
        out_std: float | None = None,
    ) -> SelfAttention:
        """Self-attention over `heads` of width `head_dim` on activations `hidden` wide."""
        query = heads.query.scaled(head_dim)
        parts = [sharded("q", query), _kv_part("k", heads, head_dim), _kv_part("v", heads, head_dim)]
        blocks, dx_blocks = _qkv_blocks(heads, head_dim, one_by_one=bool(self.layout.num_blocks))
        qkv = self.column_from(parts, hidden, blocks, dx_blocks, bias=qkv_bias)
        out = self.row("out", query, hidden, bias=out_bias, std=out_std)
        return SelfAttention(heads, head_dim, qkv, out, self.layout.summation, dropout)


def sharded(name: str, share: Share) -> Part:
    """The part of a parameter whose rows are dealt like `share`."""
    return Part(name, share.units, share.span, share.span, share.blocks)


def _kv_part(name: str, heads: HeadShare, head_dim: int) -> Part:
    kv_heads = heads.query.units // heads.group_size
    blocks = tuple(_rows(range(g, g + 1), head_dim) for g in heads.kv)
    return Part(name, kv_heads * head_dim, _rows(heads.kv, head_dim), _rows(heads.kv_owned, head_dim), blocks)


def _rows(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)


def _qkv_blocks(heads: HeadShare, head_dim: int, *, one_by_one: bool) -> tuple[list[range], list[range]]:
    """Local rows [q | k | v] as blocks to multiply, and as blocks that count for dx (replicas count where owned).

    A KV head that lives on several ranks is a block of its own: the same shape everywhere, so that its replicas'
    weights get the same bits and stay equal. One by one: a KV head comes just before the query block in which its first
    query head lies. That is where its owner sits, so walking the ranks' lists one after the other gives one and the
    same global order at any rank count.
    """
    a, g = heads.query.size, len(heads.kv)
    owned = range(heads.kv_owned.start - heads.kv.start, heads.kv_owned.stop - heads.kv.start)
    if not one_by_one:
        held_shared = [head - heads.kv.start for head in heads.kv_shared if head in heads.kv]
        alone = {a + i for i in held_shared} | {a + g + i for i in held_shared}
        runs = [_rows(run, head_dim) for run in _runs(a + 2 * g, alone)]
        if len(owned) == g:
            return runs, [_rows(range(a + 2 * g), head_dim)]
        dx = [range(a), range(a + owned.start, a + owned.stop), range(a + g + owned.start, a + g + owned.stop)]
        return runs, [_rows(block, head_dim) for block in dx]
    singles = [range(a + i, a + i + 1) for i in range(2 * g)]
    dx = []
    for block, local in zip(heads.query.blocks, heads.query.local_blocks, strict=True):
        for i in owned:
            if (heads.kv.start + i) * heads.group_size in block:
                dx += [singles[i], singles[g + i]]
        dx.append(local)
    blocks = [*heads.query.local_blocks, *singles]
    return [_rows(block, head_dim) for block in blocks], [_rows(block, head_dim) for block in dx]


def _runs(units: int, singles: set[int]) -> list[range]:
    """0 .. units-1 as neighbouring ranges, each of `singles` by itself."""
    cuts = sorted({0, units} | singles | {single + 1 for single in singles})
    return [range(start, stop) for start, stop in zip(cuts, cuts[1:], strict=False)]
