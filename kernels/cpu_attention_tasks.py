"""The tasks of one attention call: who reads which stretch of whose pages, and what must be joined afterwards.

Rows of sequences with a few new tokens (decode) take part in one lane task for every stretch of pages that their
sequence shares with others (`shared_pages`), and in row tasks for what stands behind; each span of either is a part,
and who has more than one part has a join.  Rows of sequences with many new tokens (prefill) are tiles of neighbouring
rows, each one lane task over all that they see, and have no parts.

Nothing here looks at tensors; all arrays are those of `cpu_attention_kernels.attend`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bgmpi.kernels.cpu_attention_kernels import SPAN
from bgmpi.kernels.cpu_lane_kernels import QUERIES
from bgmpi.kernels.shared_pages import Stretch

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Heads:
    """Query heads: how many, how many of them share keys (a block), and how many neighbouring rows a row task takes."""

    count: int
    block: int
    together: int

    @property
    def groups(self) -> int:
        """How many blocks there are; the last may be smaller."""
        return -(-self.count // self.block)

    def pieces(self) -> Numbers:
        """Cut blocks so that one token's heads fit into a lane task: int64 [n, 3] of block, first head, heads."""
        block = np.arange(self.groups)
        size = np.minimum(self.block, self.count - block * self.block)
        cuts = -(-size // QUERIES)
        block, size = np.repeat(block, cuts), np.repeat(size, cuts)
        first = (np.arange(len(block)) - np.searchsorted(block, block)) * QUERIES
        return np.stack([block, block * self.block + first, np.minimum(QUERIES, size - first)], axis=1)


@dataclass(frozen=True, slots=True)
class Rows:
    """New tokens: their number in the batch, their sequence, and how many cached tokens each sees, itself included."""

    token: Numbers
    sequence: Numbers
    seen: Numbers

    def of(self, chosen: NDArray[np.bool_]) -> Rows:
        """Return some of them."""
        return Rows(self.token[chosen], self.sequence[chosen], self.seen[chosen])


@dataclass(frozen=True, slots=True)
class Tasks:
    """Row tasks, lane tasks, the rows that these list, joins, and how many parts there are."""

    rows: Numbers
    lanes: Numbers
    listed: Numbers
    joins: Numbers
    parts: int


def find_tasks(few: Rows, many: Rows, sequences: int, stretches: list[Stretch], heads: Heads, window: int) -> Tasks:
    """Return all tasks.  few: rows of decode; many: those of prefill, a sequence's in order; stretches: none under a
    window."""
    base, held = np.zeros((2, sequences), np.int64)  # tokens and parts of each sequence's stretches
    first_part = []
    for stretch in stretches:
        first_part.append(held[stretch.members])
        held[stretch.members] += -(-(stretch.end - stretch.begin) // SPAN)
        base[stretch.members] = stretch.end
    start = base[few.sequence]
    begin = np.maximum(few.seen - window, 0) if window > 0 else start
    lowest = (begin - start) // SPAN
    spans = (few.seen - start - 1) // SPAN - lowest + 1
    parts = np.where(held[few.sequence] + spans > 1, held[few.sequence] + spans, 0)  # [rows], of one block of heads
    before = (np.cumsum(parts) - parts) * heads.groups
    part = np.where(parts > 0, before + held[few.sequence], -1)  # the row's own first one, in block 0
    rows = _row_tasks(few, start, begin, lowest, spans, part, parts, heads)
    shared, listed = _stretch_tasks(few, stretches, first_part, before, parts, heads)
    alone, more = _tile_tasks(many, heads, window, sum(len(rows) for rows in listed))
    lanes = np.concatenate([*shared, alone])
    lanes = lanes[np.argsort(-lanes[:, 1] * (lanes[:, 4] - lanes[:, 3]), kind="stable")]
    joined = np.flatnonzero(parts)
    row, group = np.repeat(joined, heads.groups), np.tile(np.arange(heads.groups), len(joined))
    joins = np.stack([few.token[row], group, before[row] + group * parts[row], parts[row]], axis=1)
    return Tasks(rows, np.ascontiguousarray(lanes), np.concatenate([*listed, more]), joins,
                 int(parts.sum()) * heads.groups)


def _row_tasks(
    few: Rows, start: Numbers, begin: Numbers, lowest: Numbers, spans: Numbers, part: Numbers, parts: Numbers,
    heads: Heads,
) -> Numbers:
    """Cut what each row sees behind its sequence's stretches into spans; all arrays int64 [rows]."""
    # Neighbours share a task while they are of one sequence, one piece of `together` places, and the same spans.
    kinds = np.stack([few.sequence, (few.seen - start - 1) // heads.together, lowest])
    head = np.flatnonzero(np.append(True, (kinds[:, 1:] != kinds[:, :-1]).any(0))[: len(start)])
    count = np.diff(np.append(head, len(start)))
    row, count = np.repeat(head, spans[head]), np.repeat(count, spans[head])
    ordinal = np.arange(len(row)) - np.repeat(np.cumsum(spans[head]) - spans[head], spans[head])
    bottom = start[row] + (lowest[row] + ordinal) * SPAN
    row, count, ordinal, bottom = (np.repeat(array, heads.groups) for array in (row, count, ordinal, bottom))
    group = np.tile(np.arange(heads.groups), len(row) // heads.groups)
    return np.stack([
        few.token[row], few.sequence[row], np.maximum(bottom, begin[row]),
        np.minimum(bottom + SPAN, few.seen[row] + count - 1), group,
        np.where(part[row] >= 0, part[row] + group * parts[row] + ordinal, -1), count, few.seen[row],
        parts[row] * heads.groups,
    ], axis=1).astype(np.int64)


def _stretch_tasks(
    few: Rows, stretches: list[Stretch], first_part: list[Numbers], before: Numbers, parts: Numbers, heads: Heads
) -> tuple[list[Numbers], list[Numbers]]:
    """Return the lane tasks of each stretch and the rows that they list."""
    tasks, listed, offset = [], [], 0
    for stretch, ordinals in zip(stretches, first_part, strict=True):
        place = np.minimum(np.searchsorted(stretch.members, few.sequence), len(stretch.members) - 1)
        row = np.flatnonzero(stretch.members[place] == few.sequence)
        listed.append(np.stack(
            [few.token[row], few.seen[row] - 1, before[row] + ordinals[place[row]], parts[row]], axis=1
        ))
        for block, head, count in heads.pieces().tolist():
            edges = np.linspace(0, len(row), -(-len(row) // (QUERIES // count)) + 1).astype(np.int64)
            bottom = np.arange(stretch.begin, stretch.end, SPAN)
            low, high = np.repeat(edges[:-1], len(bottom)), np.repeat(edges[1:], len(bottom))
            bottom, ordinal = np.tile(bottom, len(edges) - 1), np.tile(np.arange(len(bottom)), len(edges) - 1)
            tasks.append(_lanes(offset + low, high - low, stretch.members[0], bottom,
                                np.minimum(bottom + SPAN, stretch.end), block, ordinal, head, count))
        offset += len(row)
    return tasks, listed


def _tile_tasks(many: Rows, heads: Heads, window: int, offset: int) -> tuple[Numbers, Numbers]:
    """Return the lane tasks of prefill and the rows that they list, which stand behind `offset` others."""
    listed = np.stack([many.token, many.seen - 1, np.full_like(many.seen, -1), np.zeros_like(many.seen)], axis=1)
    tasks = [np.empty((0, 9), np.int64)]
    head = np.flatnonzero(np.append(True, many.sequence[1:] != many.sequence[:-1])[: len(many.sequence)])
    size = np.diff(np.append(head, len(many.sequence)))
    for block, first_head, count in heads.pieces().tolist():
        each = QUERIES // count
        tiles = -(-size // each)
        ordinal = np.arange(int(tiles.sum())) - np.repeat(np.cumsum(tiles) - tiles, tiles)
        low = np.repeat(head, tiles) + ordinal * each
        rows = np.minimum(each, np.repeat(head + size, tiles) - low)
        begin = np.maximum(many.seen[low] - window, 0) if window > 0 else np.zeros_like(low)
        tasks.append(_lanes(offset + low, rows, many.sequence[low], begin, many.seen[low + rows - 1], block, 0,
                            first_head, count))
    return np.concatenate(tasks), listed


def _lanes(*columns: Numbers | int) -> Numbers:
    return np.stack(np.broadcast_arrays(*columns), axis=1).astype(np.int64)
