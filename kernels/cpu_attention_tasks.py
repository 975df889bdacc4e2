"""The tasks of one attention call: who reads which stretch of whose pages, and what must be joined afterwards.

Rows of sequences with a few new tokens (decode) take part in lane tasks for every stretch of pages that their sequence
shares with the same others (`shared_pages`), and have row tasks for what stands behind.  Each span of either is a part,
and a row with more than one has a join.  Rows of sequences with many new tokens (prefill) are tiles of neighbouring
rows, each one lane task over all that they see, and have no parts.

Rejected: lane tasks for the tokens behind a stretch, which one sequence alone reads.  They fill a quarter of the lanes
with four heads a key, and the tasks are too short.
Nothing here looks at tensors; all arrays are those of `cpu_attention_kernels.attend`.
"""

from __future__ import annotations

from collections.abc import Callable
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
    """Return all tasks.  few: rows of decode; many: those of prefill; each a sequence's in order, and sequences in
    order.  stretches: those of `shared_pages`, none under a window."""
    reads = _reads(sequences, stretches)
    start, held = reads.base[few.sequence], reads.held[few.sequence]
    begin = np.maximum(few.seen - window, 0) if window > 0 else start
    lowest = (begin - start) // SPAN
    spans = (few.seen - start - 1) // SPAN - lowest + 1
    parts = np.where(held + spans > 1, held + spans, 0)  # [rows], of one block of heads
    before = (np.cumsum(parts) - parts) * heads.groups
    rows = _row_tasks(few, (start, begin, lowest, spans), np.where(parts > 0, before + held, -1), parts, heads)
    shared, listed = _read_tasks(few, reads, before, parts, heads)
    alone, more = _tile_tasks(many, heads, window, len(listed))
    lanes = np.concatenate([shared, alone])
    lanes = lanes[np.argsort(-lanes[:, 1] * lanes[:, 8] * (lanes[:, 4] - lanes[:, 3]), kind="stable")]
    joined = np.flatnonzero(parts)
    row, group = np.repeat(joined, heads.groups), np.tile(np.arange(heads.groups), len(joined))
    joins = np.stack([few.token[row], group, before[row] + group * parts[row], parts[row]], axis=1)
    return Tasks(rows, lanes, np.concatenate([listed, more]), joins, int(parts.sum()) * heads.groups)


@dataclass(frozen=True, slots=True)
class _Reads:
    """Who reads which stretch: begin, end int64 [n]; stretch (ascending), member, and the number of the first part that
    the member gets there, int64 [m] each.  Of every sequence: tokens and parts of all its stretches."""

    begin: Numbers
    end: Numbers
    stretch: Numbers
    member: Numbers
    part: Numbers
    base: Numbers
    held: Numbers


def _reads(sequences: int, stretches: list[Stretch]) -> _Reads:
    base, held = np.zeros((2, sequences), np.int64)
    part = [np.empty(0, np.int64)]
    for stretch in stretches:
        part.append(held[stretch.members])
        held[stretch.members] += -(-(stretch.end - stretch.begin) // SPAN)
        base[stretch.members] = stretch.end
    return _Reads(
        np.array([stretch.begin for stretch in stretches], np.int64),
        np.array([stretch.end for stretch in stretches], np.int64),
        np.repeat(np.arange(len(stretches)), [len(stretch.members) for stretch in stretches]),
        np.concatenate([part[0], *(stretch.members for stretch in stretches)]), np.concatenate(part), base, held,
    )


def _row_tasks(
    few: Rows, reach: tuple[Numbers, Numbers, Numbers, Numbers], part: Numbers, parts: Numbers, heads: Heads
) -> Numbers:
    """Cut what each row sees behind its sequence's stretches into spans.

    reach: where these end, the first token seen behind, its span and how many spans there are; part: the row's first
    one behind the stretches in block 0, or -1; parts: how many it has in a block; int64 [rows] each.
    """
    start, begin, lowest, spans = reach
    # Neighbours share a task while they are of one sequence, one piece of `together` places, and the same spans.
    kinds = np.stack([few.sequence, (few.seen - start - 1) // heads.together, lowest])
    head = np.flatnonzero(np.append(True, (kinds[:, 1:] != kinds[:, :-1]).any(0))[: len(start)])
    count = np.diff(np.append(head, len(start)))
    row, count, ordinal = np.repeat(head, spans[head]), np.repeat(count, spans[head]), _ordinals(spans[head])
    bottom = start[row] + (lowest[row] + ordinal) * SPAN
    row, count, ordinal, bottom = (np.repeat(array, heads.groups) for array in (row, count, ordinal, bottom))
    group = np.tile(np.arange(heads.groups), len(row) // heads.groups)
    return np.stack([
        few.token[row], few.sequence[row], np.maximum(bottom, begin[row]),
        np.minimum(bottom + SPAN, few.seen[row] + count - 1), group,
        np.where(part[row] >= 0, part[row] + group * parts[row] + ordinal, -1), count, few.seen[row],
        parts[row] * heads.groups,
    ], axis=1).astype(np.int64)


def _read_tasks(few: Rows, reads: _Reads, before: Numbers, parts: Numbers, heads: Heads) -> tuple[Numbers, Numbers]:
    """Return the lane tasks of all stretches and the rows that they list."""
    if not len(reads.begin):
        return np.empty((0, 9), np.int64), np.empty((0, 4), np.int64)
    first = np.searchsorted(few.sequence, reads.member)
    count = np.searchsorted(few.sequence, reads.member, side="right") - first
    row, which = np.repeat(first, count) + _ordinals(count), np.repeat(np.arange(len(count)), count)
    listed = np.stack([few.token[row], few.seen[row] - 1, before[row] + reads.part[which], parts[row]], axis=1)
    size = np.bincount(reads.stretch[which], minlength=len(reads.begin))
    offset, sequence = np.cumsum(size) - size, reads.member[np.searchsorted(reads.stretch, np.arange(len(size)))]
    spans = -(-(reads.end - reads.begin) // SPAN)

    def cut(most: int) -> Numbers:
        cuts = -(-size // most)
        number = np.repeat(np.arange(len(size)), cuts * spans)
        piece, span = np.divmod(_ordinals(cuts * spans), spans[number])
        low, high = (size[number] * edge // cuts[number] for edge in (piece, piece + 1))  # of about the same size
        bottom = reads.begin[number] + span * SPAN
        end = np.minimum(bottom + SPAN, reads.end[number])
        return np.stack([offset[number] + low, high - low, sequence[number], bottom, end, span], axis=1)

    return _for_all_heads(heads, cut), listed


def _tile_tasks(many: Rows, heads: Heads, window: int, offset: int) -> tuple[Numbers, Numbers]:
    """Return the lane tasks of prefill and the rows that they list, which stand behind `offset` others."""
    if not len(many.token):
        return np.empty((0, 9), np.int64), np.empty((0, 4), np.int64)
    listed = np.stack([many.token, many.seen - 1, np.full_like(many.seen, -1), np.zeros_like(many.seen)], axis=1)
    head = np.flatnonzero(np.append(True, many.sequence[1:] != many.sequence[:-1]))
    size = np.diff(np.append(head, len(many.sequence)))

    def cut(most: int) -> Numbers:
        tiles = -(-size // most)
        low = np.repeat(head, tiles) + _ordinals(tiles) * most
        rows = np.minimum(most, np.repeat(head + size, tiles) - low)
        begin = np.maximum(many.seen[low] - window, 0) if window > 0 else np.zeros_like(low)
        end = many.seen[low + rows - 1]
        return np.stack([offset + low, rows, many.sequence[low], begin, end, np.zeros_like(low)], axis=1)

    return _for_all_heads(heads, cut), listed


def _for_all_heads(heads: Heads, cut: Callable[[int], Numbers]) -> Numbers:
    """Return lane tasks of all heads.  cut(most rows) -> int64 [n, 6]: first listed row, rows, sequence, first and last
    + 1 cached token, ordinal."""
    pieces, tasks = heads.pieces(), []
    for size in sorted(set(pieces[:, 2].tolist())):
        mine, some = pieces[pieces[:, 2] == size], cut(QUERIES // size)
        task = np.empty((len(mine), len(some), 9), np.int64)
        task[:, :, :5], task[:, :, 6] = some[:, :5], some[:, 5]
        task[:, :, 5], task[:, :, 7], task[:, :, 8] = mine[:, :1], mine[:, 1:2], size
        tasks.append(task.reshape(-1, 9))
    return np.concatenate(tasks)


def _ordinals(count: Numbers) -> Numbers:
    """Return 0 .. count[0] - 1, 0 .. count[1] - 1, and so on."""
    return np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
