"""One rank of a PyTorch training job, tensor parallel over gloo, driven step by step through standard input.

    python torch_train.py '{"form": "functions", "rank": 0, "ranks": 2, "port": 29500, "model": "gpt2", ...}'

Two forms of the same model, data and optimizer (AdamW, fused; gradient-norm clipping; one thread a rank):

- "functions": plain modules cut by hand, with the two autograd functions of Megatron-LM (identity / all-reduce and
  all-reduce / identity), a vocabulary-parallel embedding and cross entropy;
- "dtensor": `torch.distributed.tensor.parallel` on whole modules (ColwiseParallel, RowwiseParallel, loss_parallel).

Each line "step" on standard input runs one step; rank 0 answers with a line of JSON: seconds and loss.
"""

from __future__ import annotations

import json
import os
import sys
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Copy(torch.autograd.Function):
    """Identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, dy):
        dy = dy.contiguous()
        if dist.get_world_size() > 1:
            dist.all_reduce(dy)
        return dy


class Reduce(torch.autograd.Function):
    """All-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        if dist.get_world_size() > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, dy):
        return dy


class VocabParallelLoss(torch.autograd.Function):
    """Mean cross entropy of logits [t, v/tp] that are never gathered."""

    @staticmethod
    def forward(ctx, logits, targets, start):
        largest = logits.amax(dim=1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        e = torch.exp_(logits - largest[:, None])
        local = targets - start
        held = (local >= 0) & (local < logits.shape[1])
        rows = torch.arange(len(targets))
        picked = torch.where(held, logits[rows, local.clamp(0, logits.shape[1] - 1)], 0.0)
        sums = torch.stack((e.sum(dim=1), picked))
        dist.all_reduce(sums)
        ctx.save_for_backward(e.div_(sums[0, :, None]), rows[held], local[held])
        return (sums[0].log() + largest - sums[1]).mean()

    @staticmethod
    def backward(ctx, dloss):
        p, rows, columns = ctx.saved_tensors
        p[rows, columns] -= 1
        return p.mul_(dloss / p.shape[0]), None, None


class RMSNorm(nn.Module):
    """Llama's norm."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-5)


class Block(nn.Module):
    """A pre-norm block with this rank's share of heads and FFN columns (`ranks` 1: all of them)."""

    def __init__(self, s, ranks):
        super().__init__()
        gpt2, h = s.model == "gpt2", s.hidden
        self.s, self.heads, self.kv_heads = s, s.heads // ranks, s.kv_heads // ranks
        f = s.ffn // ranks
        norm = (lambda: nn.LayerNorm(h, 1e-5)) if gpt2 else (lambda: RMSNorm(h))
        self.norm1, self.norm2 = norm(), norm()
        self.q = nn.Linear(h, self.heads * s.head_dim, bias=gpt2)
        self.k = nn.Linear(h, self.kv_heads * s.head_dim, bias=gpt2)
        self.v = nn.Linear(h, self.kv_heads * s.head_dim, bias=gpt2)
        self.out = nn.Linear(self.heads * s.head_dim, h, bias=gpt2 and ranks == 1)
        self.up = nn.Linear(h, f, bias=gpt2)
        self.gate = None if gpt2 else nn.Linear(h, f, bias=False)
        self.down = nn.Linear(f, h, bias=gpt2 and ranks == 1)
        cut = gpt2 and ranks > 1  # the bias of a row-parallel linear is added once, after the sum
        self.out_bias = nn.Parameter(torch.zeros(h)) if cut else None
        self.down_bias = nn.Parameter(torch.zeros(h)) if cut else None
        self.by_hand = ranks > 1

    def forward(self, x, rotation):
        x = x + self._summed(self._attention(self._copied(self.norm1(x)), rotation), self.out_bias)
        return x + self._summed(self._mlp(self._copied(self.norm2(x))), self.down_bias)

    def _attention(self, x, rotation):
        b, t, _ = x.shape
        q, k, v = (linear(x).view(b, t, -1, self.s.head_dim).transpose(1, 2) for linear in (self.q, self.k, self.v))
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.out(o.transpose(1, 2).reshape(b, t, -1))

    def _mlp(self, x):
        up = self.up(x)
        return self.down(F.gelu(up, approximate="tanh") if self.gate is None else F.silu(self.gate(x)) * up)

    def _copied(self, x):
        return Copy.apply(x) if self.by_hand else x

    def _summed(self, y, bias):
        y = Reduce.apply(y) if self.by_hand else y
        return y if bias is None else y + bias


def rotate(x, cos, sin):
    """RoPE on halves."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Model(nn.Module):
    """Embedding, blocks, norm and a tied head."""

    def __init__(self, s, ranks, rank):
        super().__init__()
        self.s, self.by_hand = s, ranks > 1
        rows = s.vocab // ranks
        self.start = rank * rows
        self.table = nn.Embedding(rows, s.hidden)
        self.positions = nn.Embedding(s.seq, s.hidden) if s.model == "gpt2" else None
        self.blocks = nn.ModuleList(Block(s, ranks) for _ in range(s.layers))
        self.norm = nn.LayerNorm(s.hidden, 1e-5) if s.model == "gpt2" else RMSNorm(s.hidden)
        self.head = nn.Linear(s.hidden, rows, bias=False)
        self.head.weight = self.table.weight
        self.rotation = None if s.model == "gpt2" else rope(s)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids):
        x = self._embedded(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x, self.rotation)
        x = self.norm(x)
        return self.head(Copy.apply(x) if self.by_hand else x)

    def _embedded(self, ids):
        if not self.by_hand:
            return self.table(ids)
        local = ids - self.start
        held = (local >= 0) & (local < self.table.num_embeddings)
        return Reduce.apply(self.table(local.clamp(0, self.table.num_embeddings - 1)) * held[..., None])

    def loss(self, ids, targets):
        logits = self(ids).flatten(0, 1)
        if self.by_hand:
            return VocabParallelLoss.apply(logits, targets.flatten(), self.start)
        return F.cross_entropy(logits, targets.flatten())


def rope(s):
    """cos and sin [seq, d/2]."""
    angles = torch.outer(torch.arange(s.seq).float(), 1e4 ** (-torch.arange(0, s.head_dim, 2).float() / s.head_dim))
    return angles.cos(), angles.sin()


def with_dtensors(model, ranks):
    """The whole model cut by torch.distributed.tensor.parallel."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {
        "table": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    for name in ("q", "k", "v", "up", "gate"):
        plan[f"blocks.*.{name}"] = ColwiseParallel()
    for name in ("out", "down"):
        plan[f"blocks.*.{name}"] = RowwiseParallel()
    if model.blocks[0].gate is None:
        del plan["blocks.*.gate"]
    parallelize_module(model, init_device_mesh("cpu", (ranks,)), plan)
    model.head.weight = model.table.weight
    return model


def parameters(model, ranks):
    """The parameters that are cut over the ranks, and those that every rank has whole."""
    uncut = ("norm", "positions", "out_bias", "down_bias", "out.bias", "down.bias")
    named = dict(model.named_parameters())
    whole = [p for name, p in named.items() if ranks == 1 or any(word in name for word in uncut)]
    whole = [p for p in whole if not hasattr(p, "to_local")]
    return [p for p in named.values() if not any(p is other for other in whole)], whole


def clip(sharded, whole, largest):
    """Scale all gradients so that their global norm is at most `largest`; each element counts once."""
    cut, uncut = ([local(p.grad) for p in group] for group in (sharded, whole))
    squares = torch.zeros(())
    if cut:
        squares = torch.stack(torch._foreach_norm(cut)).square().sum()
        dist.all_reduce(squares)
    if uncut:
        squares = squares + torch.stack(torch._foreach_norm(uncut)).square().sum()
    torch._foreach_mul_(cut + uncut, torch.clamp(largest / (squares.sqrt() + 1e-6), max=1.0))


def local(x):
    """This rank's part of a DTensor; any other tensor itself."""
    return x.to_local() if hasattr(x, "to_local") else x


def make_step(s):
    """A function that runs one step and returns the loss."""
    by_hand = s.form == "functions"
    torch.manual_seed(1 if not by_hand else 1 + s.rank)
    model = Model(s, s.ranks if by_hand else 1, s.rank if by_hand else 0)
    uses_dtensors = not by_hand and s.ranks > 1
    if uses_dtensors:
        model = with_dtensors(model, s.ranks)
    sharded, whole = parameters(model, s.ranks)
    groups = [{"params": group} for group in (sharded, whole) if group]  # fused kernels don't mix kinds of tensor
    optimizer = torch.optim.AdamW(groups, lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(s.vocab, (s.batch, s.seq + 1), generator=generator)

    def step():
        if uses_dtensors:
            from torch.distributed.tensor.parallel import loss_parallel

            with loss_parallel():
                loss = model.loss(ids[:, :-1], ids[:, 1:])
                loss.backward()
        else:
            loss = model.loss(ids[:, :-1], ids[:, 1:])
            loss.backward()
        clip(sharded, whole, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss = loss.detach()
        return float(loss.full_tensor() if hasattr(loss, "full_tensor") else loss)

    return step


def main():
    """Run steps until standard input ends."""
    s = SimpleNamespace(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(s.port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=s.rank, world_size=s.ranks)
    step = make_step(s)
    answer = {"ready": torch.__version__}
    if s.rank == 0:
        print(json.dumps(answer), flush=True)
    for line in sys.stdin:
        if line.strip() != "step":
            break
        started = time.perf_counter()
        loss = step()
        answer = {"seconds": time.perf_counter() - started, "loss": loss}
        if s.rank == 0:
            print(json.dumps(answer), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
