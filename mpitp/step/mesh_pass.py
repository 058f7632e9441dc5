"""One step of training on any mesh, recorded: microbatches through the stages, gradients summed over the replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle

from mpitp.comm.group import Group
from mpitp.comm.mesh import Mesh, make_mesh
from mpitp.comm.observed import ObservedGroup
from mpitp.layers.gathered import deal_weights
from mpitp.layers.site import Site, make_site
from mpitp.models.batch import Batch
from mpitp.models.layered import LayeredModel
from mpitp.models.runner import PlainRunner, Runner
from mpitp.optim.dealt_weights import WithDealtWeights
from mpitp.optim.reduction import InBuckets, InOrder, Reduction, make_reduction
from mpitp.pipeline.runner import PipelineRunner
from mpitp.step.film import RankOp
from mpitp.step.record import Recorder, record_pass
from mpitp.step.update import Update

BUCKET_BYTES = 1 << 60  # all gradients of a kind in one sum: by bytes, ranks with uneven shards would have others


@dataclass(frozen=True, slots=True)
class Layout:
    """Ranks along the axes beside tp, which has those that are left, and what goes over them. `microbatches`: of each
    replica (0: as many as there are stages). `blocks` > 0: the invariant mode. `zero`: of what replicas keep rows
    alone: nothing, the optimizer's moments (1), gradients too (2), weights too (3).
    """

    pp: int = 1
    dp: int = 1
    ep: int = 1
    cp: int = 1
    schedule: str = "1f1b"
    microbatches: int = 0
    cp_form: str = "ring"
    sequence_parallel: bool = False
    blocks: int = 0
    zero: int = 0

    @property
    def sizes(self) -> dict[str, int]:
        """Of the axes beside tp."""
        return {"pp": self.pp, "dp": self.dp, "ep": self.ep, "cp": self.cp}

    @property
    def others(self) -> int:
        """Ranks that a mesh with one along tp has."""
        return self.pp * self.dp * self.ep * self.cp

    @property
    def chunks(self) -> int:
        """Parts of the model that a stage has."""
        return 2 if self.schedule == "interleaved" and self.pp > 1 else 1

    @property
    def num_parts(self) -> int:
        """Parts into which the model is cut: blocks that it needs."""
        return self.pp * self.chunks

    def site_on(self, mesh: Mesh) -> Site:
        """What a model of this layout is laid on. Raises ConfigError for what has no invariant mode."""
        return make_site(
            mesh,
            sequence_parallel=self.sequence_parallel,
            cp_form=self.cp_form,
            invariant_blocks=self.blocks,
        )

    @property
    def least_tokens(self) -> int:
        """Of a sequence, so that each rank of cp has an early and a late piece of it."""
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def num_batches(self) -> int:
        """Microbatches of all replicas; ranks along ep have sequences of their own as well."""
        return self.dp * self.ep * (self.microbatches or self.pp)


def _reduction(model: LayeredModel, layout: Layout) -> Reduction:
    """How the replicas' gradients become one; with ZeRO-3 the weights are dealt first. A collective."""
    if layout.zero == 3:
        deal_weights(model.layers, model.site.mesh)
        return WithDealtWeights(model)
    return make_reduction(model, layout.zero, BUCKET_BYTES)


def record(
    group: Group, make_model: Callable[[Site], LayeredModel], batches: Sequence[Batch], layout: Layout
) -> list[RankOp]:
    """Every operation of this rank. `batches`: of all replicas, dealt to them in turn. A collective."""
    if layout.num_batches == layout.others == 1:
        return record_pass(
            group, make_model, batches[0], sequence_parallel=layout.sequence_parallel, blocks=layout.blocks
        )
    recorder = Recorder()
    mesh = make_mesh(ObservedGroup(group, recorder, "all", whole_sums=True), layout.sizes)
    model = make_model(layout.site_on(mesh))
    reduction = _reduction(model, layout)
    recorder.watch(model)
    recorder.is_dealt = layout.zero > 0
    if isinstance(reduction, InBuckets) and layout.zero:
        recorder.pieces = [param for _, param in reduction.params]
    runner: Runner = PlainRunner(model, reduction)
    if layout.pp > 1:
        for param in recorder.params:
            param.deferral = recorder.deferral
        runner = PipelineRunner(model, layout.schedule, reduction)
    recorder.is_open = True
    replica, replicas = mesh["dp"].rank * mesh["ep"].size + mesh["ep"].rank, mesh["dp"].size * mesh["ep"].size
    own = [batch.cut(mesh["cp"].rank, mesh["cp"].size) for batch in batches[replica::replicas]]
    reduction.begin(runner.rounds(own))
    if isinstance(reduction, InOrder):
        recorder.totals = reduction.totals
        recorder.in_order = cycle(shard.name for shard in reduction.shards if shard.group.size > 1)
    runner(own, 1.0 / sum(batch.num_targets for batch in batches))
    recorder.forget_activations()
    Update(recorder, model, reduction).run()
    return recorder.ops
