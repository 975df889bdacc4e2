"""In which order the rows of a job are read: by priority, then by deadline, then by place, with ageing (law 6).

All rows of a batch are there from the start, so the whole order is decided once, as arrays, and everything behind it
(rank 0's queue, a rank's backlog, who yields) keeps it.  Of every `ageing` + 1 turns the last belongs to the oldest row
that waits, the first of the input, whatever its priority; the others to the first by the strict order.  So after k
such turns the first k rows of the input have been read, and

    the row with i rows before it is read at the latest as number (ageing + 1) * (i + 1), counted from 1:

at most ageing * (i + 1) rows that stand behind it overtake it, and it starts at most ageing + 1 times as late as it
would without priorities.  `latest_turns` is this bound.  It holds for any strict order; where prompts share prefixes
rows are read by units of several, and `unit_order` keeps it.

Who was read out of its class because it had aged counts as one of the class that was being read: `level` never falls
from one turn to the next, so older on a rank is never less urgent, and ranks need no rule of ageing of their own.

Deadlines order rows within a class, the earliest first, which meets all of them where that can be done at all, without
knowing any rate.  Rejected: an order that is made anew as the rate is learned (lengths of answers are not known, so the
slack of a row would be a guess; it would pay only where deadlines cannot all be met), and ageing by time overtaken
(rows that wait together age together: the input's order returns all at once and shuts urgent rows out).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bgmpi.primitives import Ids

#: A key of `age_key` holds the level above so many bits of arrival.
_ARRIVAL_BITS = 40


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the rows of an input ask of the order.

    priority: int32 [rows], smaller is earlier; deadline: float32 [rows], seconds of the job, infinity where there is
    none.  Each is None where no row asks.  ageing: turns between two that belong to the oldest row.
    """

    priority: NDArray[np.int32] | None = None
    deadline: NDArray[np.float32] | None = None
    ageing: int = 0


@dataclass(frozen=True, slots=True)
class Turns:
    """rows: int64 [n], the rows in the order in which they are read; level: int32 [n], how urgent each turn is, from 0,
    the most urgent; it never falls."""

    rows: Ids
    level: NDArray[np.int32]


def turns_of(rows: Ids, wishes: Wishes) -> Turns:
    """Return the turns of these rows, int64 [n] ascending; in their own order where nobody asks for another."""
    level = levels_among(rows, wishes)
    if wishes.priority is None and wishes.deadline is None:
        return Turns(rows, level)
    strict = strict_order(level, None if wishes.deadline is None else wishes.deadline[rows])
    order = aged(strict, wishes.ageing)
    urgent = np.minimum.accumulate(level[order][::-1])[::-1]
    return Turns(rows[order], urgent)


def levels_among(rows: Ids, wishes: Wishes) -> NDArray[np.int32]:
    """Return how urgent these rows are among each other, int32 [n], from 0, the most urgent, without gaps."""
    if wishes.priority is None:
        return np.zeros(len(rows), np.int32)
    return np.unique(wishes.priority[rows], return_inverse=True)[1].astype(np.int32)


class RowByRow:
    """Turns of one row each, in an order that is decided once."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._next = 0

    @property
    def left(self) -> int:
        """Rows that were not read yet."""
        return len(self._turns.rows) - self._next

    def next(self) -> tuple[list[int], int]:
        """Return the row whose turn is next, and how urgent the turn is.  Only while rows are left."""
        turn = self._next
        self._next += 1
        return [int(self._turns.rows[turn])], int(self._turns.level[turn])


def strict_order(level: NDArray[np.int32], deadline: NDArray[np.float32] | None) -> Ids:
    """Return the places [n] by level, then by deadline, then as they stand: int64 [n]."""
    keys = (level,) if deadline is None else (deadline, level)
    return np.lexsort(keys).astype(np.int64)


def aged(strict: Ids, ageing: int) -> Ids:
    """Return a permutation of 0 .. n - 1 in which every (`ageing` + 1)-th turn is the smallest that is left, the others
    the first that is left of `strict`, int64 [n]."""
    count = len(strict)
    taken = bytearray(count)
    first = strict.tolist()
    order = np.empty(count, np.int64)
    urgent = oldest = 0
    for turn in range(count):
        if (turn + 1) % (ageing + 1):
            while taken[first[urgent]]:
                urgent += 1
            place = first[urgent]
        else:
            while taken[oldest]:
                oldest += 1
            place = oldest
        taken[place] = 1
        order[turn] = place
    return order


def latest_turns(rows: int, ageing: int) -> Ids:
    """Return the turn (from 0) at which each row has been read at the latest: the bound on waiting, int64 [rows]."""
    return np.minimum((ageing + 1) * np.arange(1, rows + 1), rows) - 1


def age_key(level: int, arrival: int) -> int:
    """Return a number that is smaller for who comes earlier: the more urgent level, then the earlier arrival."""
    return (level << _ARRIVAL_BITS) + arrival


def level_of(key: int) -> int:
    """Return the level in such a key."""
    return key >> _ARRIVAL_BITS


def levels_of(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the level in each of these keys, int64 [n]."""
    level: NDArray[np.int64] = keys >> _ARRIVAL_BITS
    return level
