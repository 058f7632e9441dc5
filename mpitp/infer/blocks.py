"""Which block of the KV cache holds what: tables, reuse of common beginnings, copies on write. Rank 0 keeps the books.

A block holds `BLOCK` neighbouring tokens of a text. What stands in it is filed under its content: its tokens, and the
node of the block before it. So a node stands for a whole beginning of a text, and two texts that begin alike find the
same blocks; nothing is compared by a hash alone. A block that no text holds any more stays filed until its place is
needed (the one unused for longest goes first), so a later text finds it too.

A full block is shared as it is, since nobody writes to it again. Of a block that fits only in part, the fitting part is
copied before it is written to.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

BLOCK = 16  # tokens; fewer waste less at a text's end, more are found in fewer steps
ROOT = 0  # the node of the empty beginning


@dataclass(frozen=True, slots=True)
class Match:
    """What is there already of a text: full blocks, and behind them `part` tokens, the first in block `source`."""

    blocks: tuple[int, ...] = ()
    node: int = ROOT
    source: int = -1
    part: int = 0

    @property
    def tokens(self) -> int:
        """That needn't be computed again."""
        return len(self.blocks) * BLOCK + self.part

    def whole(self) -> Match:
        """The full blocks alone."""
        return Match(self.blocks, self.node)


@dataclass(frozen=True, slots=True)
class _Content:
    parent: int
    tokens: tuple[int, ...]
    node: int


class BlockPool:
    """`num_blocks` blocks, each held by any number of texts. `files`: whether contents are found again."""

    def __init__(self, num_blocks: int, *, files: bool = True) -> None:
        self.num_blocks, self._files = num_blocks, files
        self._holders = [0] * num_blocks
        self._blank = np.ones(num_blocks, np.bool_)  # held by nobody, nothing worth keeping in it
        self._num_blank = num_blocks
        self._idle: OrderedDict[int, None] = OrderedDict()  # held by nobody, but filed; unused for longest first
        self._contents: dict[int, _Content] = {}
        self._full: dict[tuple[int, tuple[int, ...]], int] = {}  # (parent, tokens): block
        self._begun: defaultdict[tuple[int, int], dict[int, None]] = defaultdict(dict)  # (parent, first token): blocks
        self._last_node = ROOT

    @property
    def free(self) -> int:
        """Blocks that can be taken: those that nobody holds."""
        return self._num_blank + len(self._idle)

    def is_shared(self, block: int) -> bool:
        """Whether several texts hold a block."""
        return self._holders[block] > 1

    def is_held(self, block: int) -> bool:
        """Whether any text holds a block."""
        return self._holders[block] > 0

    def match(self, tokens: Sequence[int]) -> Match:
        """What is filed of these tokens, but for the last one: its logits are wanted, so it is computed in any case."""
        if not self._files:
            return Match()
        blocks: list[int] = []
        end, node = len(tokens) - 1, ROOT
        while (len(blocks) + 1) * BLOCK <= end:
            at = len(blocks) * BLOCK
            block = self._full.get((node, tuple(tokens[at : at + BLOCK])))
            if block is None:
                break
            blocks.append(block)
            node = self._contents[block].node
        rest = tokens[len(blocks) * BLOCK : min(end, (len(blocks) + 1) * BLOCK)]
        found = ((_common(self._contents[block].tokens, rest), block) for block in self._children(node, rest))
        part, source = max(found, default=(0, -1))
        return Match(tuple(blocks), node, source if part else -1, part)

    def _children(self, node: int, rest: Sequence[int]) -> Iterable[int]:
        return self._begun.get((node, rest[0]), ()) if rest else ()

    def take(self, count: int, after: int | None = None) -> list[int]:
        """`count` free blocks, held once; neighbours of each other and of block `after` where that can be had."""
        assert count <= self.free, "the plan counts the free blocks before it takes any"
        taken: list[int] = []
        for left in range(count, 0, -1):
            after = self._take_one(after, left)
            taken.append(after)
        return taken

    def _take_one(self, after: int | None, count: int) -> int:
        if after is not None and after + 1 < self.num_blocks and self._blank[after + 1]:
            block = after + 1
        elif self._num_blank:
            block = self._roomy_place(count)
        else:
            block = next(iter(self._idle))
            self._forget(block)
            self._make_blank(block)
        self._blank[block] = False
        self._num_blank -= 1
        self._holders[block] = 1
        return block

    def _roomy_place(self, count: int) -> int:
        """Where a text of at least `count` blocks has room to grow: within the longest run of blank blocks, at its
        middle where another text's last block stands before it and both still have room.
        """
        edges = np.flatnonzero(np.diff(np.concatenate(([False], self._blank, [False]))))
        starts, lengths = edges[::2], edges[1::2] - edges[::2]
        longest = int(np.argmax(lengths))
        start, length = int(starts[longest]), int(lengths[longest])
        return start + length // 2 if start and self._files and length >= 2 * count else start

    def hold(self, blocks: Iterable[int]) -> None:
        """One more text holds these."""
        for block in blocks:
            self._idle.pop(block, None)
            self._holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """A text lets go of its blocks; the last ones are forgotten first, which are of use to the fewest."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            assert self._holders[block] >= 0, "a block is released once by each of its holders"
            if self._holders[block]:
                continue
            if block in self._contents:
                self._idle[block] = None
            else:
                self._make_blank(block)

    def file(self, block: int, parent: int, tokens: Sequence[int]) -> int:
        """Say what stands in a block behind the beginning `parent`; the node of the beginning that it ends.

        Where the same is filed already, that one is found from now on, and this block's place is its holder's alone.
        """
        if not self._files:
            return ROOT
        content = tuple(tokens)
        other = self._full.get((parent, content))
        if other is not None:
            return self._contents[other].node
        if block in self._contents:
            self._forget(block)  # more of it is known now
        self._last_node += 1
        self._contents[block] = _Content(parent, content, self._last_node)
        self._begun[parent, content[0]][block] = None
        if len(content) == BLOCK:
            self._full[parent, content] = block
        return self._last_node

    def _forget(self, block: int) -> None:
        content = self._contents.pop(block)
        self._full.pop((content.parent, content.tokens), None)
        key = content.parent, content.tokens[0]
        del self._begun[key][block]
        if not self._begun[key]:
            del self._begun[key]
        self._idle.pop(block, None)

    def _make_blank(self, block: int) -> None:
        self._blank[block] = True
        self._num_blank += 1


def blocks_of(tokens: int) -> int:
    """How many blocks hold so many tokens."""
    return -(-tokens // BLOCK)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences have in common from the beginning on."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
