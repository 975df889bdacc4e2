"""Which rank each waiting sequence is given: a pure function over arrays, first come first served.

What is placed are units: a sequence alone, or neighbours of the queue that share a prefix, which go to one rank whole
though it may have a slot for the first of them only.
Every unit goes to the rank with the least estimated work that has room, as a loop over units would do it; but
rank 0 decides while all ranks wait, and ten thousand sequences may wait.  So they are dealt in slices of arrival:
within a slice the ranks are filled up to one common level of work, the emptiest rank first, and what a rank has no
room for is dealt again among the others.  Small slices keep the ranks' oldest sequences about equally old, and even
out an input that is sorted by length.

Invariant: what is placed is a prefix of the queue, so a long sequence that fits nowhere now is not overtaken for ever
(law 6).  Rejected: one rank after the other takes what it can (the last gets the leavings), and a heap (a Python step
a sequence).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NO_RANK = -1
_SLICES = 8


@dataclass(slots=True)
class Room:
    """What each rank can still take; changed by `place`.

    work: estimated work it has, float64 [ranks]; slots: sequences it may be given, int64 [ranks]; pages: pages it may
    be given, int64 [ranks]; idle: bool [ranks], it has nothing at all, so it may be given one unit of any size.
    """

    work: NDArray[np.float64]
    slots: NDArray[np.int64]
    pages: NDArray[np.int64]
    idle: NDArray[np.bool_]


def place(
    effort: NDArray[np.float64], need: NDArray[np.int64], size: NDArray[np.int64], room: Room
) -> NDArray[np.int64]:
    """Return the rank of each placed unit, int64 [placed]: the first ones of the queue, as many as fit.

    effort: work of each waiting unit, in order of arrival, float64 [n]; need: its pages, size: its sequences, int64
    [n].
    """
    count = min(len(effort), int(np.maximum(room.slots, 0).sum()))
    step = max(len(room.work), -(-count // _SLICES))
    answer = np.full(count, NO_RANK, np.int64)
    start = 0
    while start < count:
        stop = min(start + step, count)
        ranks = _deal(effort[start:stop], need[start:stop], size[start:stop], room)
        answer[start : start + len(ranks)] = ranks
        start += len(ranks)
        if start < stop:
            rank = _last_place(effort[start], need[start], size[start], room)
            if rank is None:
                break
            answer[start] = rank
            start += 1
    return answer[:start]


def _deal(
    effort: NDArray[np.float64], need: NDArray[np.int64], size: NDArray[np.int64], room: Room
) -> NDArray[np.int64]:
    """Place one slice and take it from `room` -> the ranks of its placed prefix."""
    ranks = np.full(len(effort), NO_RANK, np.int64)
    left = np.arange(len(effort))
    closed = np.zeros(len(room.work), bool)
    while len(left):
        wanted = _level(effort[left], room.work, (room.slots > 0) & ~closed)
        if wanted is None:
            break
        fits = _fitting(wanted, need[left], size[left], room)
        ranks[left[fits]] = wanted[fits]
        _take(room, wanted[fits], effort[left[fits]], need[left[fits]], size[left[fits]])
        closed[wanted[~fits]] = True
        left = left[~fits]
    if not len(left):
        return ranks
    late = np.arange(len(ranks)) > left[0]
    late &= ranks != NO_RANK
    _take(room, ranks[late], -effort[late], -need[late], -size[late])
    return ranks[: left[0]]


def _last_place(effort: float, need: int, size: int, room: Room) -> int | None:
    """Place the one that no share was left for -> the emptiest rank that has room for it; None if there is none."""
    fits = (room.slots > 0) & ((room.pages >= need) | room.idle)
    if not fits.any():
        return None
    rank = int(np.argmin(np.where(fits, room.work, np.inf)))
    _take(room, np.array([rank]), np.array([effort]), np.array([need]), np.array([size]))
    return rank


def _level(
    effort: NDArray[np.float64], work: NDArray[np.float64], is_open: NDArray[np.bool_]
) -> NDArray[np.int64] | None:
    """Return the rank of each unit, filling the open ranks to one level, emptiest first; None if none is open."""
    ranks = np.flatnonzero(is_open)
    if not len(ranks):
        return None
    ranks = ranks[np.argsort(work[ranks], kind="stable")]
    base = work[ranks]
    total = float(effort.sum())
    gap = np.arange(1, len(base) + 1) * base - np.cumsum(base)
    below = int(np.searchsorted(gap, total, side="right"))
    level = (total + base[:below].sum()) / below
    border = np.cumsum(level - base[:below])
    middle = np.cumsum(effort) - effort / 2
    return ranks[np.minimum(np.searchsorted(border, middle), below - 1)]


def _fitting(
    wanted: NDArray[np.int64], need: NDArray[np.int64], size: NDArray[np.int64], room: Room
) -> NDArray[np.bool_]:
    """Say which units fit on the rank that they want, bool [n]; `wanted` has each rank's in one piece."""
    begins = np.ones(len(wanted), bool)
    np.not_equal(wanted[1:], wanted[:-1], out=begins[1:])
    starts = np.flatnonzero(begins)
    piece = np.cumsum(begins) - 1
    before = np.cumsum(size) - size
    before -= before[starts][piece]
    pages = np.cumsum(need)
    pages = pages - (pages - need)[starts][piece]
    alone = (before == 0) & room.idle[wanted]
    fits: NDArray[np.bool_] = (before < room.slots[wanted]) & ((pages <= room.pages[wanted]) | alone)
    return fits


def _take(
    room: Room, ranks: NDArray[np.int64], effort: NDArray[np.float64], need: NDArray[np.int64], units: NDArray[np.int64]
) -> None:
    """Take units of `units` sequences each from `room`, or with negative arguments put them back."""
    size = len(room.work)
    room.work += np.bincount(ranks, weights=effort, minlength=size)
    room.slots -= np.bincount(ranks, weights=units, minlength=size).astype(np.int64)
    room.pages -= np.bincount(ranks, weights=need, minlength=size).astype(np.int64)
    room.idle[ranks[units > 0]] = False
