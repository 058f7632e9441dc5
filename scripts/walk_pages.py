"""Walk through every operation of the stepper's pages in a headless Chromium, and tell what a reader would see amiss.

usage: python scripts/walk_pages.py [PRESET...]        all presets unless some are named; needs chromium; some minutes

Each preset in several layouts (plain, invariant, sequence-parallel, axes beside tp), in both themes and three sizes of
a screen: overlaps, arrays cut off or below the screen, what is left of another operation, messages on the console.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mpitp.step.film import Film
from mpitp.step.mesh_pass import Layout
from mpitp.step.others import OTHER_PRESETS
from mpitp.step.page import page_of
from mpitp.step.source import PRESETS, Wish, make_film
from tests.step.browser import walk_page

SIZES = (1024, 768), (1366, 768), (1920, 1080)
LAYOUTS = {
    "2 ranks": Wish(ranks=2),
    "3 ranks": Wish(ranks=3),
    "3 ranks, invariant": Wish(ranks=3, invariant=True),
    "3 ranks, sequence-parallel": Wish(ranks=3, layout=Layout(sequence_parallel=True)),
    "pp 2, dp 2": Wish(ranks=4, layout=Layout(pp=2, dp=2)),
    "pp 2, zb": Wish(ranks=2, layout=Layout(pp=2, schedule="zb")),
    "pp 2, dp 2, interleaved": Wish(ranks=4, layout=Layout(pp=2, dp=2, schedule="interleaved")),
    "dp 2, tp 2, ZeRO-1": Wish(ranks=4, layout=Layout(dp=2, zero=1)),
    "dp 2, ZeRO-3": Wish(ranks=2, layout=Layout(dp=2, zero=3)),
    "dp 2, tp 2, invariant": Wish(ranks=4, layout=Layout(dp=2), invariant=True),
    "cp 2, tp 2": Wish(ranks=4, layout=Layout(cp=2)),
}
MIXTURES = ("mixtral",)
OF_EXPERTS = {"ep 2": Wish(ranks=2, layout=Layout(ep=2)), "ep 2, tp 2": Wish(ranks=4, layout=Layout(ep=2))}


def films(presets: list[str]) -> Iterator[tuple[str, Film]]:
    """Every preset in every layout that it has: of encoders and their kin along tp alone, of mixtures not the invariant
    ones.
    """
    for preset in presets:
        layouts = LAYOUTS | OF_EXPERTS if preset in MIXTURES else LAYOUTS
        for name, wish in layouts.items():
            if (preset in OTHER_PRESETS and wish.layout != Layout()) or (preset in MIXTURES and wish.invariant):
                continue
            fields = {"ranks": wish.ranks, "layout": wish.layout, "invariant": wish.invariant}
            yield f"{preset}, {name}", make_film(Wish(preset=preset, **fields))  # type: ignore[arg-type]


def main(presets: list[str]) -> int:
    """0: nothing was found."""
    worst = 0
    for name, film in films(presets or [*PRESETS, *OTHER_PRESETS]):
        for width, height in SIZES:
            with tempfile.TemporaryDirectory() as folder:
                found = walk_page(Path(folder), page_of(film), width, height)
            faults = [*found["errors"], *found["faults"], *(f"{k}: below the screen" for k in set(found["below"]))]
            print(
                f"{name}, {width}x{height}: {len(film.ops)} operations, {len(faults)} faults", *faults[:5], sep="\n  "
            )
            worst = max(worst, len(faults))
    return int(worst > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
