"""ONLONGTAIL: what becomes of the last sequences, when most ranks would idle (paper A6).

The condition is the caller's: nothing left to refill and few sequences.  Then (a) several stragglers spread evenly
over the ranks, and (b) where there are fewer than ranks, each may run over a group of ranks that have nothing else.  A
layout says for every straggler over which ranks it runs; `choose` is a pure function from what is known to the best
layout, `toward` from a layout to the next instructions that lead there.

A switch costs, and a guess may be wrong, so: the predicted end must be nearer by a margin after the cost is paid; short
remainders stay; two boundaries must agree; and for one number of stragglers the layout changes a few times at most, so
nothing flaps, whatever the clocks say (rejected: hysteresis alone, which a noisy machine defeats).

What a step takes under a layout is `StepTimes`'s to say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bgmpi.primitives import Ids, Migrate, Partition
from bgmpi.step_times import StepTimes


@dataclass(frozen=True, slots=True)
class TailRules:
    """Constants of the tail.

    few: a tail has at most so many sequences (or as many as there are ranks, when that is more); steps: a round's
    steps while a decision is near; margin: share of the time left that must be saved; least_remaining: tokens that a
    straggler must still have to run over a group; changes: layouts for one number of stragglers; patience: boundaries
    that a switch may take.
    shares: what a step over a group of that size should take, as a share of a lone one; a size that is not named is not
    used; switch_seconds: what a switch costs; lockstep: all ranks make their steps together (sparse models).
    """

    few: int = 8
    steps: int = 8
    margin: float = 0.1
    least_remaining: int = 64
    changes: int = 3
    patience: int = 8
    shares: Mapping[int, float] = field(default_factory=dict)
    switch_seconds: float = 0.05
    lockstep: bool = False


@dataclass(frozen=True, slots=True)
class Tail:
    """The stragglers at a boundary.  Arrays [k], ascending by sequence.

    owner: rank of each; active, sharded: bool; first, size: the ranks over which each runs now (size 1: its owner);
    remaining: tokens still to come, by a guess; pages: pages of KV each needs; free_pages: int64 [ranks];
    seconds_a_page: what copying a page to another rank takes.
    """

    sequences: Ids
    owner: NDArray[np.int64]
    active: NDArray[np.bool_]
    sharded: NDArray[np.bool_]
    first: NDArray[np.int64]
    size: NDArray[np.int64]
    remaining: NDArray[np.int64]
    pages: NDArray[np.int64]
    free_pages: NDArray[np.int64]
    seconds_a_page: float = 0.0

    @property
    def layout(self) -> Layout:
        """Where each runs now."""
        return Layout(tuple(self.sequences.tolist()), tuple(zip(self.first.tolist(), self.size.tolist(), strict=True)))


@dataclass(frozen=True, slots=True)
class Layout:
    """Over which ranks [first, first + size) each straggler runs."""

    sequences: tuple[int, ...]
    places: tuple[tuple[int, int], ...]


def group_sizes(ranks: int) -> list[int]:
    """Return the sizes of groups that have a communicator: powers of two, and the whole world."""
    sizes = [1 << power for power in range(1, ranks.bit_length()) if 1 << power < ranks]
    return [*sizes, ranks] if ranks > 1 else []


# --- the choice -----------------------------------------------------------------------------------------------------


def choose(
    tail: Tail, times: StepTimes, rules: TailRules, *, may_move: bool, may_shard: bool, forced: bool = False
) -> Layout:
    """Return the layout that ends the tail soonest; the present one when no other saves enough.

    forced: over groups wherever there is room, whatever it brings.
    """
    ranks = len(tail.free_pages)
    now = tail.layout
    sizes = [1] * len(tail.sequences)
    if may_shard and len(sizes) < ranks:
        sizes = _grow(tail, times, rules, forced)
    best = _settle(tail, sizes, may_move)
    if best is None or best == now or forced:
        return best or now
    before, after = _ends(tail, now, times, rules), _ends(tail, best, times, rules)
    if before is None or after is None or after + _cost(tail, now, best, rules) >= before * (1 - rules.margin):
        return now
    return best


def _grow(tail: Tail, times: StepTimes, rules: TailRules, forced: bool) -> list[int]:
    """Return the group size of each: who would end last gets more ranks, as long as that helps and groups fit."""
    ranks = len(tail.free_pages)
    steps = {1: 1.0} | {size: 1 / size for size in group_sizes(ranks)} if forced else {
        1: times.alone(1)} | {size: times.over(size) for size in group_sizes(ranks)}
    seconds = {size: value for size, value in steps.items() if value is not None}
    sizes = [1] * len(tail.sequences)
    if 1 not in seconds:
        return sizes
    least = 1 if forced else rules.least_remaining
    while True:
        ends = [left * seconds[size] for left, size in zip(tail.remaining.tolist(), sizes, strict=True)]
        last = int(np.argmax(ends))
        larger = [s for s in seconds if s > sizes[last] and seconds[s] < seconds[sizes[last]] * (1 - rules.margin)]
        larger = [s for s in larger if _fit_together([*sizes[:last], s, *sizes[last + 1 :]], ranks)]
        if not larger or tail.remaining[last] < least:
            return sizes
        sizes[last] = min(larger)


def _fit_together(sizes: Sequence[int], ranks: int) -> bool:
    """Say whether groups of these sizes fit side by side, each [k * size, (k + 1) * size) and complete."""
    taken = np.zeros(ranks, bool)
    for size in sorted(sizes, reverse=True):
        free = _free_groups(size, taken, 1)
        if not free:
            return False
        taken[free[0] : free[0] + size] = True
    return True


def _free_groups(size: int, load: NDArray[np.int64] | NDArray[np.bool_], limit: int) -> list[int]:
    """Return the first rank of every group of `size` ranks whose members all have less than `limit` sequences."""
    return [f for f in range(0, len(load) - size + 1, size) if (load[f : f + size] < limit).all()]


def _settle(tail: Tail, sizes: list[int], may_move: bool) -> Layout | None:
    """Give every straggler its ranks, its own among them where they are free; None when one cannot get there."""
    ranks, count = len(tail.free_pages), len(sizes)
    even = -(-count // ranks)
    load = np.zeros(ranks, np.int64)
    pages = tail.free_pages.copy()
    places: list[tuple[int, int] | None] = [None] * count
    order = sorted(range(count), key=lambda i: (-sizes[i], -int(tail.remaining[i]), i))
    for size in sorted(set(sizes), reverse=True):
        mine = [i for i in order if sizes[i] == size]
        limit, weight = (1, count) if size > 1 else (even if may_move else count, 1)
        for at_home in (True, False):
            for i in mine:
                home = int(tail.owner[i]) // size * size
                free = [f for f in _free_groups(size, load, limit) if (f == home) == at_home]
                if places[i] is not None or not free or not (at_home or may_move):
                    continue
                first = min(free, key=lambda f: (load[f], f))
                places[i] = (first, size)
                load[first : first + size] += weight
                pages[first : first + size] -= _new_pages(tail, i, first, size)
    found = [place for place in places if place is not None]
    if len(found) < count or (pages < np.minimum(0, tail.free_pages)).any():
        return None
    return Layout(tuple(tail.sequences.tolist()), tuple(found))


def _new_pages(tail: Tail, i: int, first: int, size: int) -> NDArray[np.int64]:
    """Return the pages that straggler `i` newly takes on each rank of the group, int64 [size]."""
    members = np.arange(first, first + size)
    has = (members >= tail.first[i]) & (members < tail.first[i] + tail.size[i])
    return np.where(has, 0, tail.pages[i])


def _ends(tail: Tail, layout: Layout, times: StepTimes, rules: TailRules) -> float | None:
    """Return the seconds until the last straggler ends under `layout`; None when nothing was ever measured."""
    lone = Counter(first for first, size in layout.places if size == 1)
    seconds = [times.over(size) if size > 1 else times.alone(lone[first]) for first, size in layout.places]
    known = np.array([one for one in seconds if one is not None])
    if len(known) < len(seconds):
        return None
    if rules.lockstep:
        known[:] = known.max()
    waits = ~(tail.active | tail.sharded) if layout == tail.layout else np.zeros(len(known), bool)
    return float((tail.remaining * known * np.where(waits, 2, 1)).max())


def _cost(tail: Tail, now: Layout, then: Layout, rules: TailRules) -> float:
    """Return the seconds that the way from one layout to another takes."""
    copied = sum(
        int(tail.pages[i])
        for i, (first, size) in enumerate(then.places)
        if not first <= tail.owner[i] < first + size
    )
    switched = any(size > 1 and place not in now.places for place in then.places for size in place[1:])
    return copied * tail.seconds_a_page + rules.switch_seconds * switched


# --- the way there --------------------------------------------------------------------------------------------------


def toward(target: Layout, tail: Tail) -> tuple[list[Migrate | Partition], bool]:
    """Return what to order at this boundary to come nearer to `target`, and whether it is reached.

    A sequence leaves its group first, then moves, then runs over the new group once all of that group is free.
    """
    orders: list[Migrate | Partition] = []
    moving: dict[tuple[int, int], list[int]] = {}
    occupied = np.zeros(len(tail.free_pages), np.int64)
    for i in range(len(tail.sequences)):
        occupied[tail.owner[i]] += 1
        if tail.sharded[i]:
            occupied[tail.first[i] : tail.first[i] + tail.size[i]] += 1
    reached = True
    for i, (first, size) in enumerate(target.places):
        name, owner = int(tail.sequences[i]), int(tail.owner[i])
        if tail.sharded[i]:
            if (int(tail.first[i]), int(tail.size[i])) != (first, size):
                orders.append(Partition(name, owner, owner, 1))
                reached = False
        elif not first <= owner < first + size:
            reached = False
            if not _in_group(tail, first):
                moving.setdefault((owner, first), []).append(name)
                occupied[first] += 1
        elif size > 1:
            reached = False
    for i, (first, size) in enumerate(target.places):
        owner = int(tail.owner[i])
        alone = occupied[first : first + size].sum() == 1 and first <= owner < first + size
        if size > 1 and alone and tail.active[i]:
            orders.append(Partition(int(tail.sequences[i]), owner, first, size))
    orders.extend(Migrate(np.array(names, np.int64), *way) for way, names in sorted(moving.items()))
    return orders, reached


def _in_group(tail: Tail, rank: int) -> bool:
    return bool((tail.sharded & (tail.first <= rank) & (rank < tail.first + tail.size)).any())


class LongTail:
    """Remembers between boundaries what was agreed on and what is under way.

    forced_every: flip groups on and off in every so manieth round, whatever they bring; 0: never.
    """

    def __init__(self, rules: TailRules, *, may_move: bool, may_shard: bool, forced_every: int = 0) -> None:
        self._rules = rules
        self._may_move = may_move
        self._may_shard = may_shard
        self._forced_every = forced_every if may_shard else 0
        self._target: Layout | None = None
        self._agreed: Layout | None = None
        self._count = 0
        self._changes = 0
        self._waited = 0
        self._settled = 0

    @property
    def may_act(self) -> bool:
        """Whether anything could be done about a tail."""
        return self._may_move or self._may_shard

    @property
    def under_way(self) -> bool:
        """Whether a switch was begun and is not finished."""
        return self._target is not None

    @property
    def near(self) -> bool:
        """Whether a switch needs but one more boundary that agrees."""
        return self._agreed is not None

    def forget(self) -> None:
        """Give up what is agreed on or under way: there is no tail, or it changed, or the way was barred."""
        self._target = self._agreed = None
        self._settled = 0

    def decide(self, tail: Tail, times: StepTimes) -> list[Migrate | Partition]:
        """Return what to order at this boundary."""
        count = len(tail.sequences)
        if count != self._count:
            self._count, self._changes = count, self._rules.changes
        if self._target is not None and self._target.sequences != tail.layout.sequences:
            self.forget()
        self._settled += 1
        if self._target is None:
            self._target = self._force(tail, times) if self._forced_every else self._agree(tail, times)
            self._waited = 0
        if self._target is None:
            return []
        orders, reached = toward(self._target, tail)
        self._waited += 1
        if reached or self._waited > self._rules.patience:
            self._target = None
            self._settled = 0
        return orders

    def _agree(self, tail: Tail, times: StepTimes) -> Layout | None:
        """Return the layout on which two boundaries agree, if it differs from the present one."""
        wanted = None
        if self._changes:
            wanted = choose(tail, times, self._rules, may_move=self._may_move, may_shard=self._may_shard)
        if wanted == tail.layout:
            wanted = None
        agreed, self._agreed = self._agreed, wanted
        if wanted is None or wanted != agreed:
            return None
        self._changes -= 1
        self._agreed = None
        return wanted

    def _force(self, tail: Tail, times: StepTimes) -> Layout | None:
        """Return the other one of: over groups, and alone; None until it is time to flip."""
        if self._settled < self._forced_every:
            return None
        if tail.sharded.any():
            alone = tuple((owner, 1) for owner in tail.owner.tolist())
            return Layout(tuple(tail.sequences.tolist()), alone)
        wanted = choose(tail, times, self._rules, may_move=self._may_move, may_shard=True, forced=True)
        return wanted if wanted != tail.layout else None
