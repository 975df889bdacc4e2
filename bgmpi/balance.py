"""Evens out ranks that have unequal work left: a pure function from arrays to moves (paper A5, step 5).

Lengths are not known, so ranks that were given equal work end unequal.  While sequences wait for a rank the queue evens
that out by itself; afterwards only a move can.  A move costs its bytes, so it must be worth them: the fullest rank must
exceed the mean by a share, and the seconds saved must exceed a floor and a multiple of the copy's.  What costs least
moves first: waiting sequences (no KV), then yielded ones, then active ones, those with most work a page first.

Nothing moves beyond the mean: a source keeps at least the mean, a target gets at most the mean.  So the sum of squares
falls with every move, and one that was decided is never taken back for the same estimates.  Rejected: exchange of pairs
(the gain is small beside the error of the estimates) and stealing by the idle rank (a lone send).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bgmpi.primitives import Ids, Migrate


@dataclass(frozen=True, slots=True)
class Evening:
    """When a move is worth it.

    uneven: how far the fullest rank must exceed the mean, as a share of the mean; least_gain: least seconds saved;
    cost_margin: times the copy's seconds that must be saved; page_bytes: bytes of a page, all layers; rate: bytes a
    second between nodes; nodes: the node of each rank, within which nothing is copied (empty: each rank its own).
    """

    uneven: float = 0.2
    least_gain: float = 0.1
    cost_margin: float = 3.0
    page_bytes: int = 0
    rate: float = 1e9
    nodes: tuple[int, ...] = ()

    def far(self, source: int, target: int) -> bool:
        """Say whether a move between these ranks copies bytes."""
        return not self.nodes or self.nodes[source] != self.nodes[target]


@dataclass(frozen=True, slots=True)
class Movable:
    """Sequences that could move.  All [n].

    owner: the rank of each; kind: 0 waiting, 1 yielded, 2 active, in which order they are taken; remaining: tokens
    still to come, by a guess; pages: pages of KV that each needs.
    """

    sequences: Ids
    owner: NDArray[np.int64]
    kind: NDArray[np.int64]
    remaining: NDArray[np.float64]
    pages: NDArray[np.int64]


def uneven_ranks(work: NDArray[np.float64], seconds_a_token: float, rules: Evening) -> bool:
    """Say whether the fullest rank exceeds the mean by so much that a move could be worth it.

    work: tokens still to come on each rank, float64 [ranks]; seconds_a_token: what one of them takes a rank.
    """
    excess = float(work.max() - work.mean())
    return excess > rules.uneven * float(work.mean()) and excess * seconds_a_token > rules.least_gain


def even_out(
    have: Movable,
    work: NDArray[np.float64],
    slots: NDArray[np.int64],
    pages: NDArray[np.int64],
    seconds_a_token: float,
    rules: Evening,
) -> list[Migrate]:
    """Return the moves that bring every rank towards the mean of `work`; none when it is not worth it.

    work: tokens still to come on each rank; slots, pages: what each can take, int64 [ranks].
    """
    if not uneven_ranks(work, seconds_a_token, rules):
        return []
    mean = float(work.mean())
    fullest = float(work.max())
    work, slots, pages = work.copy(), slots.copy(), pages.copy()
    moves = []
    for source in np.argsort(-work, kind="stable").tolist():
        if work[source] <= mean:
            break
        mine = _cheapest_first(have, source)
        for target in _targets(source, work, mean, rules):
            amount = min(work[source] - mean, mean - work[target])
            chosen = _choose(mine, have, amount, int(slots[target]), int(pages[target]))
            if not len(chosen):
                continue
            moved = float(have.remaining[chosen].sum())
            used = int(have.pages[chosen].sum())
            copied = int(have.pages[chosen[have.kind[chosen] > 0]].sum())
            if not _worth(moved, copied, source, target, seconds_a_token, rules):
                continue
            moves.append(Migrate(have.sequences[chosen], source, target))
            gone = np.zeros(len(have.sequences), bool)
            gone[chosen] = True
            mine = mine[~gone[mine]]
            work[source] -= moved
            work[target] += moved
            slots[target] -= len(chosen)
            pages[target] -= used
    return moves if (fullest - float(work.max())) * seconds_a_token > rules.least_gain else []


def _cheapest_first(have: Movable, source: int) -> NDArray[np.int64]:
    """Return the places in `have` of the source's sequences: waiting ones, the latest first (nothing to copy), then
    yielded and active ones, of either kind most work a page first."""
    mine = np.flatnonzero(have.owner == source)
    waits = have.kind[mine] == 0
    started = mine[~waits]
    order = np.lexsort((-have.remaining[started] / have.pages[started], have.kind[started]))
    return np.concatenate((mine[waits][::-1], started[order]))


def _targets(source: int, work: NDArray[np.float64], mean: float, rules: Evening) -> list[int]:
    """Return the ranks below the mean, those of the source's node first, emptiest first."""
    below = np.flatnonzero(work < mean).tolist()
    return sorted(below, key=lambda target: (rules.far(source, target), work[target], target))


def _choose(mine: NDArray[np.int64], have: Movable, amount: float, slots: int, pages: int) -> NDArray[np.int64]:
    """Return the first of `mine` (places in `have`, best first) whose sum exceeds neither amount, slots nor pages."""
    small = mine[(have.remaining[mine] <= amount) & (have.pages[mine] <= pages)]
    fits = np.cumsum(have.remaining[small]) <= amount
    fits &= np.cumsum(have.pages[small]) <= pages
    return small[fits][: max(0, slots)]


def _worth(moved: float, pages: int, source: int, target: int, seconds_a_token: float, rules: Evening) -> bool:
    cost = pages * rules.page_bytes / rules.rate if rules.far(source, target) else 0.0
    return moved * seconds_a_token > rules.cost_margin * cost
