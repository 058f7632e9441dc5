"""What attention does to a tile of scores between its matrix products: NumPy's passes, or compiled ones."""

from __future__ import annotations

from typing import Any

from mpitp.backend.accelerator import is_accelerated
from mpitp.backend.arrays import Array
from mpitp.ops.online_softmax import RunningSoftmax
from mpitp.ops.score_change import ScoreChange
from mpitp.ops.sight import Tile


class TilePasses:
    """The passes over products q k^T [rows, cols]; row i sees the columns from unseen + i to seen + i - 1."""

    def __init__(self, xp: Any, dtype: Any, scale: float, change: ScoreChange | None = None) -> None:
        self.xp, self.dtype, self.scale, self.change = xp, dtype, scale, change
        self.accelerated = is_accelerated(xp, dtype)
        self.ones = self.after = xp.empty((0, 1), dtype=dtype)

    def softmax_numerators(self, scores: Array, head: int, tile: Tile, rows: RunningSoftmax) -> None:
        """Products become exp(S - m), 0 for keys not seen; S's maxima m and the rows' sums go to `rows`."""
        scale = self._changed(scores, head, tile)
        if self.accelerated:
            from mpitp.ops.compiled import attention as compiled

            return compiled.softmax_numerators(scores, tile.unseen, tile.seen, scale, rows.row_max, rows.total)
        self._scale_and_hide(scores, tile, scale)
        rows.row_max[...] = scores.max(axis=1, keepdims=True)
        scores -= rows.row_max
        self.xp.exp(scores, out=scores)
        if len(self.ones) < scores.shape[1]:
            self.ones = self.xp.ones((scores.shape[1], 1), dtype=self.dtype)
        self.xp.matmul(scores, self.ones[: scores.shape[1]], out=rows.total)  # a sum of rows, twice as fast

    def softmax_backward(self, scores: Array, dp: Array, head: int, tile: Tile, kept: tuple[Array, Array]) -> None:
        """Products become P = exp(S - lse), 0 for keys not seen, and dp becomes scale * dS; lse and D are `kept`."""
        before = scores * self.scale if self.change is not None and self.change.uses_scores else None
        scale = self._changed(scores, head, tile)
        self._softmax_backward(scores, dp, tile, scale, kept)
        if self.change is not None:
            self.change.backward(dp, before, head, tile.query_positions, tile.key_positions)
            if self.scale != 1.0:
                dp *= self.scale

    def _changed(self, scores: Array, head: int, tile: Tile) -> float:
        """What is still to be multiplied by; where the model changes scores, they are scaled and changed here."""
        if self.change is None:
            return self.scale
        if self.scale != 1.0:
            scores *= self.scale
        self.change.forward(scores, head, tile.query_positions, tile.key_positions)
        return 1.0

    def _softmax_backward(self, scores: Array, dp: Array, tile: Tile, scale: float, kept: tuple[Array, Array]) -> None:
        lse, row_dots = kept
        if self.accelerated:
            from mpitp.ops.compiled import attention as compiled

            return compiled.softmax_backward(scores, dp, tile.unseen, tile.seen, scale, lse, row_dots)
        self._scale_and_hide(scores, tile, scale)
        scores -= lse[:, None]
        self.xp.exp(scores, out=scores)
        dp -= row_dots[:, None]
        dp *= scale
        dp *= scores

    def _scale_and_hide(self, scores: Array, tile: Tile, scale: float) -> None:
        """-inf where a key isn't seen: a triangle behind the keys that the first row sees, and one before those that
        the last row sees.
        """
        rows, cols = scores.shape
        scores *= scale
        side = cols - tile.seen
        if side > len(self.after):
            self.after = self.xp.triu(self.xp.full((side, side), -self.xp.inf, dtype=self.dtype))
        if side > 0:
            count = min(rows, side)
            scores[:count, tile.seen :] += self.after[:count, :side]
        width = min(cols, tile.unseen + rows - 1)
        if width > 0:
            hidden = self.xp.arange(width)[None, :] < self.xp.arange(tile.unseen, tile.unseen + rows)[:, None]
            scores[:, :width][hidden] = -self.xp.inf
