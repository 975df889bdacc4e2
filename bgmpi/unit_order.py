"""In which order the units of a job are read when prompts share prefixes: by worth, with the deadlines and the ageing
of `fairness` (law 6).

A unit (`share_plan`) goes to one rank together, so it is read together: rows stand by priority, then by deadline, then
by the worth of their unit, its expected answer tokens for each prompt token that it computes, highest first: what
decodes long should begin early, and prefill fills its steps. Units that hang on one larger prefix stand together, by
the worth of all that hangs on it, so that its KV is needed for one stretch of time only. Where members of a unit differ
in priority or deadline it is several units here. Worths change as lengths of answers become known, so the order is made
turn by turn (`sort`).

The bound of `fairness` holds for every row: with i rows before it, it is read at the latest as number
(ageing + 1) * (i + 1), its due.  Units are longer than a turn, so the oldest row is paid in advance:

- a unit is read whole only where the oldest row is not due before its end;
- else it is the oldest row's turn: alone, where a more urgent class waits; else with as much of its unit as can be
  read before another row is due, and a unit of the same class goes before it only where this is all of it then too.

Rows are paid in the order of the input, each is due `ageing` + 1 turns after the one before it, and no row that is
left is overdue; so paying one by one always is enough.  Units of at most `ageing` + 1 rows are never parted for their
own class.  Where larger ones lie scattered over the input the bound decides, and they come in parts of at most about
`ageing` + 1 rows, each what shares most with the oldest row.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bgmpi.fairness import Wishes, levels_among
from bgmpi.primitives import Ids
from bgmpi.share_plan import sums_below

#: Levels of larger prefixes, from the top, by which units stand together.
_LEVELS = 8


class UnitOrder:
    """The rows of a job that are to be read, by units.

    rows: int64 [n], ascending; unit: int32 [n], -1 for a row that stands alone; node: int32 [n], what each shares, -1
    for nothing; parent: int32 [K], of each node, -1 for none, smaller than the node; prefill: int64 [n], prompt tokens
    that each row computes behind those before it.
    """

    def __init__(
        self, rows: Ids, unit: NDArray[np.int32], node: NDArray[np.int32], parent: NDArray[np.int32],
        prefill: NDArray[np.int64], wishes: Wishes,
    ) -> None:  # fmt: skip
        count = len(rows)
        self._rows = rows
        self._ageing = wishes.ageing
        level = levels_among(rows, wishes)
        deadline = np.zeros(count, np.float32) if wishes.deadline is None else wishes.deadline[rows]
        alone = unit.max(initial=-1) + 1 + np.arange(count)
        unit = np.where(unit < 0, alone, unit)
        members = np.lexsort((node, deadline, level, unit))
        new = np.zeros(count, bool)
        new[:1] = True
        for key in (unit[members], level[members], deadline[members]):
            new[1:] |= key[1:] != key[:-1]
        begin = np.flatnonzero(new)
        self._node, self._parent = node, parent
        #: rows by number among `rows`, unit by unit
        self._members: NDArray[np.int32] = members.astype(np.int32)
        self._begin: NDArray[np.int32] = np.append(begin, count).astype(np.int32)
        self._group: NDArray[np.int32] = np.empty(count, np.int32)
        self._group[members] = np.cumsum(new) - 1
        self._level: NDArray[np.int32] = level[members[begin]]
        self._deadline: NDArray[np.float32] = deadline[members[begin]]
        self._prefill = self._sums(prefill).astype(np.float32)
        self._above = larger_prefixes(node, parent, self._members, self._begin)
        self._unread: NDArray[np.int32] = np.diff(self._begin)
        #: the next row that is left from each on; n where there is none
        self._next = array("i", range(count + 1))
        self._turn = 0
        self._strict: NDArray[np.int32] = np.empty(0, np.int32)
        self._head = 0

    @property
    def left(self) -> int:
        """Rows that were not read yet."""
        return len(self._rows) - self._turn

    def sort(self, decode: NDArray[np.float64]) -> None:
        """Order the units that are left by these expected answer tokens of each row, float64 [n]."""
        unread = np.flatnonzero(self._unread)
        answers, prefill = self._sums(decode)[unread], self._prefill[unread].astype(np.float64)
        worth = _ratio(answers, prefill)
        first = np.minimum.reduceat(self._members, self._begin[:-1])[unread] if len(unread) else unread
        keys: list[NDArray[np.number[Any]]] = [first, -worth]
        for above in self._above[unread].T[::-1]:
            inside, nodes = above >= 0, len(self._parent)
            named = above[inside]
            of_node = _ratio(_by_node(named, answers[inside], nodes), _by_node(named, prefill[inside], nodes))
            keys += [np.where(inside, above, nodes + np.arange(len(above))), -np.where(inside, of_node[above], worth)]
        keys += [self._deadline[unread], self._level[unread]]
        self._strict = unread[np.lexsort(keys)].astype(np.int32)
        self._head = 0

    def next(self) -> tuple[list[int], int]:
        """Return the rows of the next unit, or part of one, and how urgent its turn is (`fairness.Turns`).

        Only while rows are left, and after `sort`.
        """
        while not self._unread[self._strict[self._head]]:
            self._head += 1
        head, oldest = int(self._strict[self._head]), self._from(0)
        group = int(self._group[oldest])
        room = self._room(head)
        if group != head and room >= self._unread[head] and self._may_wait(head, group):
            group = head
        elif self._is_less_urgent(group, head):
            room = 1
        else:
            room = self._room(group)
        places = self._part(group, room, oldest)
        for place in places:
            self._next[place] = place + 1
        self._turn += len(places)
        self._unread[group] -= len(places)
        return self._rows[places].tolist(), int(self._level[head])

    # --- inside ---------------------------------------------------------------------------------------------------

    def _sums(self, values: NDArray[np.float64] | NDArray[np.int64]) -> NDArray[np.float64]:
        """Sum values of rows by unit."""
        if not len(values):
            return np.empty(0)
        return np.add.reduceat(values[self._members], self._begin[:-1], dtype=np.float64)

    def _from(self, place: int) -> int:
        """Return the first row that is left from this one on, n where there is none."""
        after = self._next
        while after[place] != place:
            after[place] = after[after[place]]
            place = after[place]
        return place

    def _room(self, *groups: int) -> int:
        """Return how many turns there are before the first row outside of these units is due."""
        place = self._from(0)
        while place < len(self._rows) and self._group[place] in groups:
            place = self._from(place + 1)
        return self.left if place == len(self._rows) else (self._ageing + 1) * (place + 1) - 1 - self._turn

    def _is_less_urgent(self, group: int, than: int) -> bool:
        keys = [(int(self._level[one]), float(self._deadline[one])) for one in (group, than)]
        return keys[0] > keys[1]

    def _may_wait(self, head: int, group: int) -> bool:
        """Say whether the oldest row's unit loses nothing when `head` goes before it."""
        if self._is_less_urgent(group, head):
            return True
        return self._room(head, group) >= int(self._unread[head] + self._unread[group])

    def _part(self, group: int, room: int, oldest: int) -> list[int]:
        """Return the next rows of a unit, at most `room`: those that are due by then first, the others in their order.

        A part is what shares most with the oldest row of all and has room together.
        """
        members = self._members[self._begin[group] : self._begin[group + 1]].tolist()
        unread = [place for place in members if self._next[place] == place]
        room = min(room, len(unread))
        due = (self._turn + room) // (self._ageing + 1)  # so many rows of the input
        together = unread
        if room < len(unread):
            due = max(due, oldest + 1)
            together = self._nearest(np.array(unread), oldest, room)
        first = sorted(place for place in unread if place < due)
        return (first + [place for place in together if place >= due])[:room]

    def _nearest(self, unread: Ids, oldest: int, room: int) -> list[int]:
        """Return the rows below the highest node on a row's path below which there are at most so many; those of its
        own node where there are more."""
        node = int(self._node[oldest])
        near = unread[self._node[unread] == node]
        while node >= 0:
            at = self._node[unread]
            while (at > node).any():
                at = np.where(at > node, self._parent[at], at)
            below = unread[at == node]
            if len(below) > room:
                break
            near, node = below, int(self._parent[node])
        places: list[int] = near.tolist()
        return places


def larger_prefixes(
    node: NDArray[np.int32], parent: NDArray[np.int32], members: NDArray[np.int32], begin: NDArray[np.int32]
) -> NDArray[np.int32]:
    """Return the prefixes on which each unit hangs beside others, from the top, int32 [units, levels], -1 for none.

    node: int32 [n], what each row shares; members: int32 [n], rows unit by unit; begin: int32 [units + 1].
    """
    size, above = np.diff(begin), node[members[begin[:-1]]]
    below = np.append(sums_below(parent, node, np.ones(len(node), np.int32)), 0)  # [-1]: no node
    found = []
    while (above >= 0).any():
        larger = below[above] > size
        found.append(np.where(larger, above, -1))
        above = np.where(above >= 0, parent[above], -1)
    depth: NDArray[np.int64] = np.zeros(len(size), np.int64)
    for one in found:
        depth += one >= 0
    levels: NDArray[np.int32] = np.full((len(size), min(int(depth.max(initial=0)), _LEVELS)), -1, np.int32)
    for one in found:
        units = np.flatnonzero(one >= 0)
        depth[units] -= 1
        units = units[depth[units] < levels.shape[1]]
        levels[units, depth[units]] = one[units]
    return levels


def _by_node(node: NDArray[np.int32], values: NDArray[np.float64], nodes: int) -> NDArray[np.float64]:
    return np.bincount(node, values, nodes).astype(np.float64)


def _ratio(answers: NDArray[np.float64], prefill: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the first by the second, infinity where nothing is computed."""
    ratio: NDArray[np.float64] = np.divide(answers, prefill, out=np.full(len(answers), np.inf), where=prefill > 0)
    return ratio
