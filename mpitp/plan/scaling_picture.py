"""Weak scaling as an SVG: tokens a second of a rank against ranks, each number beside its point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 360, 70, 90, 56, 50

_STYLE = """<style>
svg{--paper:#ffffff;--ink:#1b2430;--soft:#5b6776;--grid:#dde3e8;--mark:#0072b2}
@media (prefers-color-scheme:dark){svg{--paper:#12161c;--ink:#e6ebf0;--soft:#a3afbb;--grid:#2b343f;--mark:#56b4e9}}
text{fill:var(--ink);font-family:sans-serif;font-size:12px}.soft{fill:var(--soft);font-size:11px}
</style>"""


def scaling_svg(points: Sequence[tuple[int, float]], title: str) -> str:
    """`points`: (ranks, tokens a second of a rank)."""
    top = max(value for _, value in points) * 1.15
    low, high = (math.log2(points[i][0]) for i in (0, -1))

    def place(ranks: int, value: float) -> tuple[float, float]:
        across = (math.log2(ranks) - low) / (high - low) if high > low else 0.5
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)

    made = [_text(16, 24, title), _text(16, 42, "tokens a second of a rank, against ranks", "soft")]
    for part in range(5):
        y = place(points[0][0], top * part / 4)[1]
        made.append(f'<path d="M{LEFT} {y:.1f} H{WIDTH - RIGHT}" stroke="var(--grid)"/>')
        made.append(_text(LEFT - 8, y + 4, f"{top * part / 4:,.3g}", "soft", "end"))
    places = [place(*point) for point in points]
    path = " L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    made.append(f'<path d="M{path}" fill="none" stroke="var(--mark)" stroke-width="2"/>')
    for (x, y), (ranks, value) in zip(places, points, strict=True):
        made.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="var(--mark)"/>')
        made.append(_text(x, y - 10, f"{value / points[0][1]:.0%}", "", "middle"))
        made.append(_text(x, HEIGHT - BOTTOM + 18, f"{ranks:,}", "soft", "middle"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img">\n{_STYLE}\n<rect width="100%" height="100%" fill="var(--paper)"/>\n'
        + "\n".join(made)
        + "\n</svg>\n"
    )


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'
