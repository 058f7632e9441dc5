"""The exercises of examples 13 and on, and of those that extend mpitp; see `check.py`."""

from __future__ import annotations

import runpy
from typing import Any

import numpy as np

from examples.measured import HERE, Calls, Exercise, given_out, site_on, watched
from mpitp.comm import ForwardingGroup, Group, SerialGroup, abstract_mesh, make_mesh, run_threads
from mpitp.errors import ConfigError, PlacementError
from mpitp.layers import ArrayType, AttentionDropout, AttentionSizes, Builder, GatherFromSP, Halo, Rows, make_site, walk
from mpitp.layers.layer import FORWARD
from mpitp.layers.partition import split_evenly
from mpitp.models import MODEL_TYPES
from mpitp.ops.convolution import Geometry
from mpitp.ops.online_softmax import join_finished
from mpitp.pipeline.schedules import make_schedule
from mpitp.pipeline.simulate import simulate
from mpitp.plan.cost import Step, StepCost, cost_of
from mpitp.plan.layout import Layout
from mpitp.train.deal import Deal


def site_of_sequences(ranks: int, rank: int = 0) -> Any:
    """A site with sequence parallelism on ranks that don't run."""
    return make_site(abstract_mesh({"tp": ranks}, rank), sequence_parallel=True)


def positions_of(tokens: int, rank: int, ranks: int) -> list[int]:
    """Where in a sequence the rows of a rank along cp lie."""
    runs = Rows.of((tokens,)).cut(rank, ranks).runs
    return [place for run in runs for place in range(run.first, run.first + run.length)]


def joined_lse(a: float, b: float) -> float:
    """log sum exp of two pieces of keys, each with its own."""
    o, lse = np.zeros((1, 1, 1)), np.full((1, 1), a)
    join_finished(o, lse, o.copy(), np.full((1, 1), b))
    return float(lse[0, 0])


def ring_sends(ranks: int) -> int:
    """How often keys and values move on in a forward pass, from each rank."""

    def program(group: Group) -> int:
        site = make_site(make_mesh(group, {"cp": ranks}))
        sizes = AttentionSizes(site.heads(2, 2), 4, 8)
        attention = Builder(site, 1.0).attention(sizes, AttentionDropout(0.0, "attention"))
        sends = [send for _, layer in walk({"attention": attention}) for send in layer.sends()]
        return sum(send.calls for send in sends if (send.phase, send.op) == (FORWARD, "send"))

    return run_threads(ranks, program)[0]


def trips(ranks: int) -> list[tuple[np.ndarray, int]]:
    """Of example 17 on so many ranks: the rows that each rank's experts get, and how often it has called anything."""
    mixture = runpy.run_path(str(HERE / "17_experts_and_all_to_all.py"))["mixture"]

    def program(group: Group) -> tuple[np.ndarray, int]:
        seen, calls = watched(group)
        x = np.random.default_rng(group.rank).standard_normal((30 // ranks + (group.rank < 30 % ranks), 4))
        trip = mixture(seen, x, x)[-1]
        return trip.counts, len(calls.ops)

    return run_threads(ranks, program)


def cost_on(**axes: int) -> StepCost:
    """Of example 18's small model in a layout, behind Ethernet."""
    example = runpy.run_path(str(HERE / "18_choosing_a_layout.py"))
    return cost_of(example["anatomy_of"](example["SMALL"], "ethernet_cpu"), Step(8), Layout(**axes))


def bytes_of_parameter() -> int:
    memory = cost_on().memory
    return round((memory.weights + memory.gradients + memory.optimizer) / (memory.weights / 4))


def longest_optimizer() -> str:
    return max(("tp", "pp", "dp"), key=lambda axis: cost_on(**{axis: 2}).parts["optimizer"])


def halo(kernel: int, height: int, ranks: int) -> list[Halo]:
    """The exchange of every rank."""
    geometry = Geometry(height, 8, kernel, padding=kernel // 2)
    return [Halo(abstract_mesh({"tp": ranks}, rank)["tp"], geometry) for rank in range(ranks)]


def refused(change: Any) -> str:
    """Whether a group that changes all_reduce alone is refused, as this change has it: yes or no."""
    try:
        make_mesh(change(SerialGroup()))
    except ConfigError:
        return "yes"
    return "no"


class Own(ForwardingGroup):
    """An all-reduce of its own."""

    def all_reduce(self, x: Any, op: str = "sum", out: Any = None) -> Any:
        return self.inner.all_reduce(x, op, out)


def started_goes_through_own() -> str:
    """Whether what layers start calls the override: yes or no."""

    class Noted(Own):
        called = False

        def all_reduce(self, x: Any, op: str = "sum", out: Any = None) -> Any:
            self.called = True
            return super().all_reduce(x, op, out)

    group = Noted(SerialGroup())
    group.start_all_reduce(np.ones(3)).wait()
    return "yes" if group.called else "no"


def squared_before_sum() -> str:
    """What the types say of a square of summands: refused or accepted."""
    try:
        ArrayType.of(("tp",), tp="P").expect_summed("what is squared")
    except PlacementError:
        return "refused"
    return "accepted"


def bottleneck_sums() -> int:
    """The collectives of a forward and a backward pass of a column- and a row-parallel product in a row."""

    def program(group: Group) -> Calls:
        seen, calls = watched(group)
        build = Builder(make_site(seen), 0.1)
        share = build.site.share(7)
        up, down = build.column(("",), 4, share, bias=False), build.row("", share, 4, bias=False)
        calls.ops.clear()
        inner, up_ctx = up.forward(np.ones((3, 4), np.float32))
        _, down_ctx = down.forward(inner)
        up.backward(down.backward(np.ones((3, 4), np.float32), down_ctx), up_ctx)
        return calls

    return len(run_threads(3, program)[0].ops)


MESH_EXERCISES: dict[str, list[Exercise]] = {
    "13": [
        Exercise(
            "5 microbatches are dealt to 3 replicas. How many has each? (three numbers)",
            lambda: [len(Deal(rank, 3).of(5)) for rank in range(3)],
            "unevenly where they don't divide.",
            why="7, 7 naq 6. Gur ybff vf qvivqrq ol gur gnetrgf bs nyy, fb abobql'f zvpebongpu pbhagf zber.",
        ),
        Exercise(
            "One replica has 10 targets with a mean loss of 2, another 30 with a mean of 4. The loss of the step?",
            lambda: float(np.average([2, 4], weights=[10, 30])),
            "the mean over all targets isn't the mean of the means.",
            why="(75 + 675) / 95 = 8.0. Gur zrna bs gur zrnaf, 8, jbhyq znxr gur hcqngr qrcraq ba qc.",
        ),
        Exercise(
            "AdamW's two moments of 1000 float32 weights, ZeRO 1 on 4 replicas: how many bytes has each?",
            lambda: 2 * 4 * len(Deal(0, 4).of(1000)),
            "each replica updates its rows alone.",
            why="3 a / c = 7555 vafgrnq bs 3555. Gur fnzr olgrf ner frag: n fhz va gjb unyirf vf gur fnzr fhz.",
        ),
    ],
    "14": [
        Exercise(
            "7 tokens with sequence parallelism on 3 ranks: how many rows has each between the products? (three "
            "numbers)",
            lambda: [len(site_of_sequences(3, rank).token_share(7)) for rank in range(3)],
            "dealt like everything.",
            why="8, 7 naq 7. Jung abezf, qebcbhg naq erfvqhnyf xrrc sbe onpxjneq vf qvivqrq yvxrjvfr.",
        ),
        Exercise(
            "GatherFromSP takes V. Which letter does it give?",
            lambda: given_out(GatherFromSP(site_on(3).tp)),
            "every rank has all rows then, and uses them for its own columns.",
            why="E, ercyvpngr: rdhny inyhrf hfrq sbe qvssrerag jbex, fb gung gur tenqvrag vf n fhzznaq naq vgf "
            "onpxjneq n erqhpr-fpnggre.",
        ),
        Exercise(
            "Is the gradient of a norm's weight still to be summed over tp then? (yes or no)",
            lambda: "yes" if "tp" in Builder(site_of_sequences(3), 1.0).between(8).placement.partial else "no",
            "the norm on a rank has seen its own rows only.",
            why="Lrf: rnpu enax nqqf hc bire vgf bja gbxraf. N sbetbggra fhz urer genvaf, naq trgf fybjyl jbefr: "
            "n pynffvp.",
        ),
    ],
    "15": [
        Exercise(
            "4 stages, 8 microbatches, 1F1B: which share of the time is idle, in percent?",
            lambda: 100 * simulate(make_schedule("1f1b", 4, 8)).bubble,
            "(p - 1) / (m + p - 1).",
            why="8 / 66 = 72.8 %. TCvcr unf gur fnzr ohooyr; 6S6O arrqf yrff zrzbel, abg yrff gvzr.",
        ),
        Exercise(
            "How many microbatches' activations does the first stage hold at most, with gpipe and with 1f1b? (two "
            "numbers)",
            lambda: [simulate(make_schedule(name, 4, 8)).in_flight[0] for name in ("gpipe", "1f1b")],
            "GPipe does all forwards first.",
            why="3 naq 9: 6S6O tbrf onpx nf fbba nf vg pna, fb ab zber guna c ner haqre jnl.",
        ),
        Exercise(
            "And how many microbatches at least keep zero-bubble's idle share at 10 % or less on 4 stages?",
            lambda: next(m for m in range(4, 40) if simulate(make_schedule("zb", 4, m)).bubble <= 0.1),
            "try: mpitp plan schedule --pp 4 --microbatches 8 --schedule zb.",
            why="Jrvtug tenqvragf, sbe juvpu abobql jnvgf, svyy gur tncf: n guveq bs 6S6O'f ohooyr jurer S, O "
            "naq J gnxr gur fnzr gvzr.",
        ),
    ],
    "16": [
        Exercise(
            "12 tokens on 3 ranks of cp: which positions has rank 0? (four numbers)",
            lambda: positions_of(12, 0, 3),
            "an early and a late piece of six.",
            why="Cvrprf 5 naq 0: haqre n pnhfny znfx rneyl ebjf frr yvggyr naq yngr barf zhpu, naq nyy enaxf "
            "unir nf zhpu gb qb.",
        ),
        Exercise(
            "Two pieces of keys have log sum exp 0 each. What have they together?",
            lambda: joined_lse(0.0, 0.0),
            "log(exp 0 + exp 0).",
            why="ybt 7 = 5.148. Bayl b naq yfr bs n cvrpr ner arrqrq gb chg n fbsgznk gbtrgure, abg vgf fpberf.",
        ),
        Exercise(
            "Keys go round 4 ranks. How often does a rank send keys and values on in a forward pass?",
            lambda: ring_sends(4),
            "the last ones needn't go on.",
            why="c - 6 = 8 gvzrf, rnpu gvzr oruvaq gur jbex jvgu gubfr gung ner urer.",
        ),
    ],
    "17": [
        Exercise(
            "7 experts on 3 ranks: how many has each? (three numbers)",
            lambda: [len(own) for own in split_evenly(7, 3)],
            "dealt like everything.",
            why="8, 7 naq 7. Urng qbrfa'g sbyybj: juvpu bs gurz vf ohfl qrcraqf ba gur qngn, naq abobql pna "
            "qrny gung orsberunaq.",
        ),
        Exercise(
            "30 tokens go to 2 of 7 experts each. How many rows do all experts get together?",
            lambda: sum(int(counts.sum()) for counts, _ in trips(3)),
            "a token is a row for each expert that it goes to.",
            why="15: gjvpr nf znal ebjf nf gbxraf, jungrire gur ahzore bs rkcregf. Gung vf jung znxrf n zvkgher purnc.",
        ),
        Exercise(
            "On 9 ranks two have no expert at all. Do they call as many all-to-alls as the others? (yes or no)",
            lambda: "yes" if len({calls for _, calls in trips(9)}) == 1 else "no",
            "what would the others wait for?",
            why="Lrf: jvgu rzcgl oybpxf. N pnyy gung qrcraqf ba gur qngn ba bar enax nybar jbhyq unat gur erfg.",
        ),
    ],
    "18": [
        Exercise(
            "How many bytes does a parameter take in weights, gradients and AdamW's moments together, in float32 on "
            "one rank?",
            bytes_of_parameter,
            "four arrays of its size.",
            why="61: jrvtug, tenqvrag naq gjb zbzragf bs 9 olgrf rnpu. gc naq cc qvivqr nyy bs gurz, MrEB "
            "gur cneg gung vg qrnyf.",
        ),
        Exercise(
            "Two ranks, without ZeRO. Along which axis does each rank still have the whole optimizer step to do: tp, "
            "pp or dp?",
            longest_optimizer,
            "which axis has replicas?",
            why="qc: ercyvpnf nyy hcqngr nyy jrvtugf, hayrff MrEB qrnyf gur ebjf. gc naq cc unir srjre "
            "jrvtugf ba rnpu enax.",
        ),
    ],
    "19": [
        Exercise(
            "Images of 12 rows on 3 ranks, kernel 5, padding 2. How many rows does rank 0 send to rank 1?",
            lambda: len(halo(5, 12, 3)[0].shared(0, 1)),
            "how far above its first row does a window of rank 1 see?",
            why="Gjb, (x - 6) / 7 gb rnpu fvqr: jungrire gur urvtug, naq gvzrf gur jvqgu naq gur punaaryf.",
        ),
        Exercise(
            "Images of 3 rows on 3 ranks, the same kernel. From how many other ranks does rank 0 get rows?",
            lambda: sum(len(halo(5, 3, 3)[0].shared(owner, 0)) > 0 for owner in (1, 2)),
            "each rank has one row, and a window sees five.",
            why="Sebz obgu: n unyb znl or jvqre guna jung n arvtuobhe ubyqf. Gura phggvat ol punaaryf fraqf yrff.",
        ),
        Exercise(
            "Images of 32 x 32, kernel 3, stride 2, padding 1: how many rows and columns has the output? (two numbers)",
            lambda: list(Geometry(32, 32, 3, 2, 1).outputs),
            "(size + 2 padding - kernel) // stride + 1.",
            why="61 naq 61. Gurve ebjf ner qrnyg gb gur enaxf narj, fb gung fgnpxrq ynlref svg.",
        ),
    ],
    "your_own_layer": [
        Exercise(
            "A bottleneck: column-parallel, relu squared, row-parallel. How many collectives do its forward and "
            "backward call together?",
            bottleneck_sums,
            "one pair each way.",
            why="Gjb: l sbejneq, qk onpxjneq. Jung fgnaqf orgjrra gur cebqhpgf pbfgf abguvat ba gur jver.",
        ),
        Exercise(
            "Someone squares behind the row-parallel product and before its sum. What do the types say, refused or "
            "accepted?",
            squared_before_sum,
            "expect_summed.",
            why="Ershfrq, orsber nalguvat vf pbzchgrq: gur fdhner bs n fhz vf ab fhz bs fdhnerf.",
        ),
    ],
    "your_own_model": [
        Exercise(
            "Is a model type from outside among the types of mpitp before it has been registered? (yes or no)",
            lambda: "yes" if "two_gates" in MODEL_TYPES else "no",
            "register_model, or the entry point of an installed package.",
            why="Ab: n pbasvt jvgu na haxabja zbqry_glcr vf ershfrq, jvgu gur arnerfg xabja bar, vafgrnq bs "
            "ohvyqvat n fgbpx oybpx.",
        ),
    ],
    "your_own_all_reduce": [
        Exercise(
            "A ForwardingGroup overrides all_reduce alone. Do the sums that layers start go through it? (yes or no)",
            started_goes_through_own,
            "what does Group.start_all_reduce call?",
            why="Lrf: fgnegrq pbyyrpgvirf bs n SbejneqvatTebhc tb guebhtu gur oybpxvat barf.",
        ),
        Exercise(
            "Is such a class refused by make_mesh? (yes or no)",
            lambda: refused(Own),
            "only what layers would pass by is refused.",
            why="Ab. Bar qrevirq sebz n xvaq gung fgnegf fhzf va vgf bja jnl (BofreirqTebhc, ZcvTebhc) jbhyq or.",
        ),
    ],
}
