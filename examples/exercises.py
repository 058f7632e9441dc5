"""The exercises of examples 01 to 12. An answer is what the library says when it is asked; see `check.py`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from examples.measured import (
    Exercise,
    linear_pass,
    llama,
    loss_of_equal_logits,
    messages,
    mlp_forward_calls,
    most_ranks,
    own_tensor_equals_whole,
    sends_of,
    site_on,
    taken_in,
    unnoticed_without_sum,
    work_to_bytes,
)
from examples.planted_bugs import COURSE, FAULTS
from mpitp.layers import ArrayType, Builder, ReduceFromTP
from mpitp.layers.layer import BACKWARD, FORWARD
from mpitp.layers.partition import share_heads, share_of, split_evenly
from mpitp.trace.traffic import wire_bytes

HERE = Path(__file__).resolve().parent


EXERCISES: dict[str, list[Exercise]] = {
    "01": [
        Exercise(
            "9 outputs of W are dealt to 4 ranks. How many has each? (four numbers)",
            lambda: [len(piece) for piece in split_evenly(9, 4)],
            "sizes differ by one at most, and the first ranks have the larger ones.",
            why="Abguvat unf gb qvivqr: 4 = 8 + 7 + 7 + 7.",
        ),
        Exercise(
            "x [4, 6] is cut along its 6 columns, W [5, 6] likewise, over 3 ranks. How many numbers does each rank "
            "hand to the sum that makes y?",
            lambda: int(np.prod(linear_pass("row", 3, 4, 6, 5).shapes[0])),
            "which shape has the partial product of a rank?",
            why="Gur qvz gung vf fhzzrq bire vf gur bar gung jnf phg, fb rirel enax unf n cnegvny fhz bs gur "
            "jubyr l, 9 k 0.",
        ),
        Exercise(
            "W is cut along its outputs, x is the same on every rank and used by each for its own part. Which letter "
            "has y: I, R, V or P?",
            lambda: (
                Builder(site_on(3), 1.0)
                .column(("",), 4, site_on(3).share(7), bias=False)
                .placements(ArrayType.of(("tp",)))
                .along("tp")
            ),
            "does a rank have all columns of y, summands of them, or some of them?",
            why="I, inelvat: rnpu enax unf vgf bja pbyhzaf. Abguvat vf zvffvat va gurz, fb abguvat vf fhzzrq.",
        ),
    ],
    "02": [
        Exercise(
            "An MLP, column-parallel and then row-parallel, runs forward on 3 ranks. How many collectives are called?",
            mlp_forward_calls,
            "what the first product leaves on a rank is what the second one takes there.",
            why="Bar: gur fhz oruvaq gur frpbaq cebqhpg. Orgjrra gur gjb rnpu enax jbexf ba vgf bja pbyhzaf.",
        ),
        Exercise(
            "Which letter has what the row-parallel product makes, before its sum?",
            lambda: taken_in(ReduceFromTP(site_on(3).summation())),
            "every rank's array has the right shape and the wrong values.",
            why="C, cnegvny: fhzznaqf. N abayvarnevgl urer jbhyq or nccyvrq gb fhzznaqf, naq tryh(n) + tryh(o) "
            "vf abg tryh(n + o).",
        ),
        Exercise(
            "8 FFN columns on 3 ranks: how many has each? (three numbers)",
            lambda: [share_of(8, rank, 3).size for rank in range(3)],
            "one rank has fewer.",
            why="Gur svefg 3 zbq 8 = 7 enaxf trg bar zber.",
        ),
    ],
    "03": [
        Exercise(
            "Forward, CopyToTP does nothing. What does its backward call?\na nothing   b all_reduce   c all_gather",
            lambda: {"all_reduce": "b", "all_gather": "c"}.get((linear_pass("column", 3, 3, 4, 7).ops or [""])[0], "a"),
            "x was used on every rank, and each use adds to the gradient.",
            why="Na nyy-erqhpr: gur nqwbvag bs pbclvat gb c enaxf vf nqqvat hc c tenqvragf.",
        ),
        Exercise(
            "A column-parallel linear with 4 inputs and 7 outputs, 3 tokens, float64, on 3 ranks. How many bytes does "
            "a rank hand to the collective of its backward?",
            lambda: 8 * int(np.prod(linear_pass("column", 3, 3, 4, 7).shapes[0])),
            "what is summed is dx; its shape doesn't depend on the outputs.",
            why="qk vf [8, 9] ba rirel enax: 67 ahzoref bs 3 olgrf. Gur bhgchgf gung n enax unf qba'g znggre.",
        ),
        Exercise(
            "Backward forgets its sum. At how many ranks would nobody ever notice?",
            unnoticed_without_sum,
            "when is a rank's own part all there is?",
            why="Ba bar enax, jurer gur fhz unf bar fhzznaq. Gung vf jul rirel grfg urer ehaf ba frireny.",
        ),
    ],
    "04": [
        Exercise(
            "9 query heads with 3 KV heads on 2 ranks. Which KV heads does rank 1 hold? (their numbers, from 0)",
            lambda: list(share_heads(9, 3, 1, 2).kv),
            "rank 1 has query heads 5 to 8, and three of them share a KV head.",
            why="Dhrel urnqf 0..3 hfr XI urnqf 6 (0) naq 7 (1, 2, 3): XI urnq 6 yvirf ba obgu enaxf.",
        ),
        Exercise(
            "8 query heads with 2 KV heads on 4 ranks. How many KV heads live on more than one rank?",
            lambda: len(share_heads(8, 2, 0, 4).kv_shared),
            "each rank has 2 query heads; 4 of them use one KV head.",
            why="Obgu: enaxf 5 naq 6 arrq XI urnq 5, enaxf 7 naq 8 XI urnq 6. Gurve tenqvragf ner fhzzrq, rnpu "
            "vf fnirq bapr.",
        ),
        Exercise(
            "9 query heads with 3 KV heads, head_dim 4, on 2 ranks. How many numbers a token do the ranks sum for KV "
            "heads in backward?",
            lambda: sum(s.width for s in sends_of(llama(), "blocks.0.attention.heads") if s.phase == BACKWARD),
            "one KV head lives on two ranks, and it has a k and a v.",
            why="7 k 9: qx naq qi bs gur bar funerq urnq. Gur bguref ner jubyr jurer gurl ner.",
        ),
    ],
    "05": [
        Exercise(
            "A vocabulary of 50 on 3 ranks. Rank 2 has the rows from which id up to which, the last one not counted? "
            "(two numbers)",
            lambda: [share_of(50, 2, 3).span.start, share_of(50, 2, 3).span.stop],
            "50 = 17 + 17 + 16, without padding.",
            why="Gur svefg gjb enaxf unir 62 ebjf rnpu, fb enax 7 ortvaf ng 89.",
        ),
        Exercise(
            "How many numbers a token does the loss exchange, forward?",
            lambda: sum(s.width for s in sends_of(llama(), "loss") if s.phase == FORWARD),
            "a maximum; and what else does log sum exp(z - max) - z[target] need?",
            why="Guerr: gur znkvzhz, gur fhz bs rkcbaragvnyf, naq gur gnetrg'f ybtvg. Ybtvgf ner arire tngurerq.",
        ),
        Exercise(
            "Which rank of 3 has row 40 of a vocabulary of 50?",
            lambda: next(rank for rank in range(3) if 40 in share_of(50, rank, 3).span),
            "see the first exercise.",
            why="Bayl bar enax unf gur ebj; gur bguref nqq mrebf gb gur fhz, juvpu vf rknpg va nal beqre.",
        ),
    ],
    "06": [
        Exercise(
            "A block whose KV heads all live on one rank each (4 heads, 4 KV heads, 2 ranks). How many sums has its "
            "forward, and how many its backward? (two numbers)",
            lambda: [
                sum(s.phase == phase for s in sends_of(llama(4, 4, 32), "blocks.0") if s.width)
                for phase in (FORWARD, BACKWARD)
            ],
            "each of attention and MLP ends in a row-parallel product and begins with a column-parallel one.",
            why="Gjb naq gjb: oruvaq bhg naq qbja sbejneq; orsber dxi naq hc onpxjneq.",
        ),
        Exercise(
            "And backward with 9 heads and 3 KV heads on 2 ranks?",
            lambda: sum(s.phase == BACKWARD for s in sends_of(llama(), "blocks.0") if s.width),
            "a KV head lives on both ranks now.",
            why="Guerr: gur tenqvragf bs funerq XI urnqf ner fhzzrq gbb.",
        ),
    ],
    "07": [
        Exercise(
            "A character model knows 64 characters and nothing else yet. About which loss does it begin with?",
            lambda: loss_of_equal_logits(64),
            "all characters are about as likely; the loss is -log of the right one's probability.",
            why="ybt 19 = 9.61. N svefg ybff sne sebz ybt(ibpnohynel) vf n oht, be n zbqry gung vfa'g serfu.",
        ),
        Exercise(
            "Rank 1 of 3 draws its rows of a fresh weight. Are they rows of what one rank would draw? (yes or no)",
            own_tensor_equals_whole,
            "random numbers depend on the seed and on where an element lies in the global tensor.",
            why="Lrf: n pbhagre-onfrq trarengbe vf nfxrq sbe gur ahzoref ng tybony cynprf, fb gung nyy ynlbhgf "
            "ortva nyvxr.",
        ),
    ],
    "08": [
        Exercise(
            "In float32, what is (100000000 + 1) - 100000000?",
            lambda: int((np.float32(1e8) + np.float32(1)) - np.float32(1e8)),
            "float32 has 24 bits: how far apart are the numbers near 1e8?",
            why="5: arne 6r3 gurl yvr 3 ncneg, fb gur 6 vf ybfg. Va nabgure beqre, (6r3 - 6r3) + 6, vg vfa'g.",
        ),
        Exercise(
            "12 heads in 5 invariant blocks on 2 ranks: how many blocks has rank 0?",
            lambda: len(share_of(12, 0, 2, 5).blocks),
            "whole blocks are dealt, as evenly as can be.",
            why="Guerr bs svir. N oybpx'f cebqhpg unf bar funcr ba rirel ahzore bs enaxf, naq oybpxf ner nqqrq "
            "sebz yrsg gb evtug.",
        ),
        Exercise(
            "On how many ranks at most can 5 invariant blocks be laid?",
            lambda: most_ranks(5),
            "blocks never part.",
            why="Svir, bar oybpx n enax. Zber enaxf jnag zber oybpxf, naq bgure oybpxf ner bgure ovgf.",
        ),
    ],
    "09": [
        Exercise(
            "A block on 2 ranks (h = 32, 4 heads and KV heads): how many numbers a token does a rank hand to all sums "
            "of forward and backward together?",
            lambda: sum(send.width for send in sends_of(llama(4, 4, 32), "blocks.0")),
            "four sums of t h numbers.",
            why="9 u n gbxra, jungrire gur ahzore bs enaxf: 9 k 87.",
        ),
        Exercise(
            "A ring all-reduce of 1200 bytes on 3 ranks: how many bytes does each rank send?",
            lambda: int(wire_bytes("all_reduce", 3, 1200, 1200)),
            "2 n (p - 1) / p.",
            why="6155: gjvpr gjb guveqf bs vg. Jvgu zber enaxf vg pbzrf pybfr gb 7 a, naq arire zber.",
        ),
    ],
    "10": [
        Exercise(
            "A ring all-reduce on 5 ranks: how many messages does rank 0 send?",
            lambda: messages("ring", 5),
            "p - 1 steps that add, p - 1 that copy.",
            why="Rvtug. Rnpu jnvgf sbe gur bar orsber, fb sbe fznyy neenlf gur yngrapl pbhagf 7 (c - 6) gvzrf.",
        ),
        Exercise(
            "A tree on 5 ranks, rank 0 the root: how many messages does rank 0 send?",
            lambda: messages("tree", 5),
            "on the way down only, to ranks 4, 2 and 1.",
            why="Guerr, ybt7(0) ebhaqrq hc. Srj fgrcf, ohg rnpu jvgu gur jubyr neenl.",
        ),
    ],
    "11": [
        Exercise(
            "How many times as much work for each number that is sent does a block have when its width h doubles?",
            lambda: float(round(work_to_bytes(64) / work_to_bytes(32), 1)),
            "products cost t h h, sums t h.",
            why="Gjvpr: jbex tebjf jvgu u fdhnerq, genssvp jvgu u. Jvqr zbqryf orne fybj yvaxf, naq zber enaxf "
            "phg gur jbex nybar.",
        ),
        Exercise(
            "A ring of 4 ranks, 8 MB, 10 GB/s a link, 10 microseconds a message. How many milliseconds?",
            lambda: 1e3 * messages("ring", 4) * (10e-6 + 8e6 / 4 / 10e9),
            "2 (p - 1) messages of a quarter each.",
            why="Fvk zrffntrf bs 7 ZO: 1 k (5.56 + 5.7) zf. Gur yngrapl vf n gjragvrgu urer; ng 35 xO vg jbhyq "
            "or zbfg.",
        ),
    ],
    "12": [
        Exercise(
            "How many of the dozen bugs are errors already when the model is put together (the types tell)?",
            lambda: sum(FAULTS[name].types for name in COURSE),
            "python examples/12_what_breaks.py --answers marks them. Guess first.",
            why="Gubfr va juvpu n cnve vf zvffvat, qbhoyrq be bs gur jebat xvaq. N jebat ahzore va gur evtug "
            "cynpr unf gur evtug glcr.",
        ),
        Exercise(
            "'the embedding's gradient replaces that of the tied head': is it told by the types, or by numbers only? "
            "(types or numbers)",
            lambda: "types" if FAULTS["tied gradients not added"].types else "numbers",
            "what is the type of a gradient that was overwritten?",
            why="Ahzoref bayl: += naq = unir gur fnzr glcr. Gur rkrepvfrf tb ba va gur tnzr: clguba "
            "rknzcyrf/purpx.cl oernxf",
        ),
    ],
}
