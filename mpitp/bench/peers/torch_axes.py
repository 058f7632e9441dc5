"""One rank of a PyTorch training job over gloo, all ranks along one axis, driven step by step through standard input.

    python torch_axes.py '{"form": "ddp", "rank": 0, "ranks": 2, "port": 29500, "address": "127.0.0.1", ...}'

The model, its data, AdamW and the clipping are those of torch_train.py; a step takes `microbatches` of them:

- "tp": the functions of torch_train.py, all ranks along it; one microbatch after the other;
- "ddp": DistributedDataParallel, each rank with its share of the microbatches, gradients summed behind the last;
- "fsdp": `fully_shard` of every block and of the whole (FSDP2): weights are gathered where they are used;
- "pp": `torch.distributed.pipelining`, 1F1B, a stage a rank. Its head has weights of its own: stages share none.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch_train import Model, clip, parameters


class Stage(nn.Module):
    """The blocks of one rank of a pipeline; the first has the embedding, the last norm and head."""

    def __init__(self, s):
        super().__init__()
        whole = Model(s, 1, 0)
        first, stop = (s.layers * rank // s.ranks for rank in (s.rank, s.rank + 1))
        self.blocks, self.rotation = whole.blocks[first:stop], whole.rotation
        self.table = whole.table if s.rank == 0 else None
        self.positions = whole.positions if s.rank == 0 else None
        is_last = s.rank == s.ranks - 1
        self.norm = whole.norm if is_last else None
        self.head = nn.Linear(s.hidden, s.vocab, bias=False) if is_last else None

    def forward(self, x):
        if self.table is not None:
            x = self.table(x)
        if self.positions is not None:
            x = x + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x, self.rotation)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


def optimizer_of(groups):
    """AdamW as torch_train.py has it."""
    return torch.optim.AdamW(groups, lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def tp_step(s, ids):
    """Tensor parallelism by hand."""
    torch.manual_seed(1 + s.rank)
    model = Model(s, s.ranks, s.rank)
    sharded, whole = parameters(model, s.ranks)
    optimizer = optimizer_of([{"params": group} for group in (sharded, whole) if group])

    def step():
        total = 0.0
        for each in ids:
            loss = model.loss(each[:, :-1], each[:, 1:]) / len(ids)
            loss.backward()
            total += float(loss.detach())
        clip(sharded, whole, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def ddp_step(s, ids):
    """Replicas with whole weights: gradients are summed once, behind the last microbatch."""
    model = nn.parallel.DistributedDataParallel(Model(s, 1, 0))
    return replica_step(s, ids, model, model.no_sync)


def fsdp_step(s, ids):
    """Weights dealt to the replicas, gathered for every microbatch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = Model(s, 1, 0), init_device_mesh("cpu", (s.ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return replica_step(s, ids, fully_shard(model, mesh=mesh), contextlib.nullcontext)


def replica_step(s, ids, model, unsummed):
    """This rank's share of the microbatches; `unsummed`: around all but the last."""
    own = ids[s.rank :: s.ranks]
    optimizer = optimizer_of(model.parameters())

    def step():
        total = 0.0
        for i, each in enumerate(own):
            with contextlib.nullcontext() if i + 1 == len(own) else unsummed():
                loss = F.cross_entropy(model(each[:, :-1]).flatten(0, 1), each[:, 1:].flatten()) / len(own)
                loss.backward()
            total += float(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def pipeline_step(s, ids):
    """A stage of 1F1B."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    model = Stage(s)
    stage = PipelineStage(model, s.rank, s.ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, len(ids), lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()))
    optimizer = optimizer_of(model.parameters())
    own = list(model.parameters())
    rows = ids.flatten(0, 1)  # all microbatches, one below the other

    def step():
        losses: list[torch.Tensor] = []
        inputs = [rows[:, :-1]] if s.rank == 0 else []
        if s.rank == s.ranks - 1:
            schedule.step(*inputs, target=rows[:, 1:], losses=losses)
        else:
            schedule.step(*inputs)
        clip(own, [], 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return sum(float(loss.detach()) for loss in losses) / len(ids)

    return step


def main():
    """Run steps until standard input ends."""
    s = SimpleNamespace(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR=s.address, MASTER_PORT=str(s.port))
    if s.address == "127.0.0.1":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", rank=s.rank, world_size=s.ranks)
    torch.manual_seed(1)
    ids = torch.randint(s.vocab, (s.microbatches, s.batch, s.seq + 1), generator=torch.Generator().manual_seed(1))
    forms = {"tp": tp_step, "pp": pipeline_step, "ddp": ddp_step, "fsdp": fsdp_step}
    step = forms[s.form](s, ids)
    print(json.dumps({"ready": torch.__version__}), flush=True)
    for line in sys.stdin:
        if line.strip() != "step":
            break
        started = time.perf_counter()
        loss = step()
        print(json.dumps({"seconds": time.perf_counter() - started, "loss": loss}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
