"""Ranks that obey the scheduler without computing: a toy that refuses what a real rank could not do.

Every rank keeps its active sequences, its backlog and what it holds, makes one token a step for each active sequence,
and ends a sequence when it has its true length.  Anything illegal raises at once: an instruction about a sequence that
is not there, a group whose ranks have something else, instructions out of order.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from bgmpi.coroutine import State
from bgmpi.primitives import (
    FEW_ACTIVE,
    NOBODY,
    Admit,
    Arrived,
    Combine,
    InputEnded,
    Instruction,
    Migrate,
    Moved,
    Partition,
    Reported,
    Run,
    Stop,
    Yield,
)
from bgmpi.scheduler import Scheduler

ORDER = (Yield, Migrate, Combine, Partition, Admit, Run)


class ToyRank:
    """One rank.  slots: most active sequences; pages: its pool, a page a started sequence and 64 tokens."""

    def __init__(self, rank: int, slots: int, pages: int) -> None:
        self.rank, self.slots, self.pool = rank, slots, pages
        self.active: list[int] = []
        self.backlog: list[int] = []
        self.held: set[int] = set()
        self.started: set[int] = set()
        self.leads: int | None = None
        self.follows = False
        self.moves: list[Moved] = []
        self.steps = self.tokens = 0
        self.seconds = 0.0

    def says(self, state: State, *names: int) -> None:
        self.moves.append(Moved(int(state), np.array(names, np.int64)))

    def has(self) -> set[int]:
        return {*self.active, *self.backlog, *self.held, *([self.leads] if self.leads is not None else [])}


class Toy:
    """All ranks and the true lengths.  lengths[i]: tokens that sequence i generates; fails(): whether a copy fails;
    refuses(): whether a group cannot be made; hiccups(): whether a rank makes a sequence yield of its own;
    seconds(active, size): time of one step."""

    def __init__(
        self, lengths: list[int], ranks: int, slots: int, pages: int, *, prompt: int = 10,
        fails: Callable[[], bool] = lambda: False, hiccups: Callable[[], bool] = lambda: False,
        refuses: Callable[[], bool] = lambda: False,
        seconds: Callable[[int, int], float] = lambda active, size: 0.01 * (1 + active) / size,
    ) -> None:
        self.lengths, self.prompt = lengths, prompt
        self.ranks = [ToyRank(rank, slots, pages) for rank in range(ranks)]
        self.decoded = [0] * len(lengths)
        self.fails, self.hiccups, self.refuses, self.seconds = fails, hiccups, refuses, seconds
        self.groups: dict[int, range] = {}
        self.ends: list[int] = []
        self.seen: dict[str, int] = dict.fromkeys(
            ("yield", "migrate", "combine", "partition", "alone", "failed", "refused"), 0)
        self.clock = 0.0

    def pages_of(self, name: int) -> int:
        return -(-(self.prompt + self.decoded[name]) // 64) + 1

    def free(self, rank: ToyRank) -> int:
        return rank.pool - sum(self.pages_of(name) for name in rank.has() if name in rank.started)

    def reports(self) -> list[Reported]:
        made = []
        for one in self.ranks:
            few = sorted(one.active) if len(one.active) <= FEW_ACTIVE else []
            if one.leads is not None:
                few = [one.leads]
            made.append(Reported(
                rank=one.rank, moves=tuple(one.moves), free_pages=self.free(one), pool_pages=one.pool,
                slots_free=one.slots - len(one.active), backlog=len(one.backlog), steps=one.steps,
                generated_tokens=one.tokens, seconds=one.seconds,
                active=np.array(few, np.int64) if few else NOBODY,
                decoded=np.array([self.decoded[name] for name in few], np.int64) if few else NOBODY,
            ))
            one.moves, one.steps, one.tokens, one.seconds = [], 0, 0, 0.0
        return made

    def obey(self, said: list[list[Instruction]]) -> None:
        shared = [[i for i in one if isinstance(i, Migrate | Partition)] for one in said]
        assert all([id(i) for i in one] == [id(i) for i in shared[0]] for one in shared), "not told to all alike"
        for one in said:
            kinds = [ORDER.index(type(i)) for i in one]
            assert kinds == sorted(kinds) and kinds.count(5) == 1, f"wrong order: {one}"
        for rank, one in zip(self.ranks, said, strict=True):
            for order in one:
                if isinstance(order, Yield):
                    self._yield(rank, order.sequences.tolist())
        for order in shared[0]:
            if isinstance(order, Migrate):
                self._migrate(order)
        for rank, one in zip(self.ranks, said, strict=True):
            for order in one:
                if isinstance(order, Combine):
                    self._combine(rank, order.sequences.tolist())
        for order in shared[0]:
            if isinstance(order, Partition):
                self._partition(order)
        for rank, one in zip(self.ranks, said, strict=True):
            for order in one:
                if isinstance(order, Admit):
                    assert not rank.follows and rank.leads is None
                    rank.backlog.extend(order.sequences.tolist())
        runs = [one[-1] for one in said]
        assert all(isinstance(run, Run) for run in runs) and len({run.steps for run in runs}) == 1
        for rank in self.ranks:
            self._run(rank, runs[0].steps)
        self.clock += max(rank.seconds for rank in self.ranks)

    def _yield(self, rank: ToyRank, names: list[int]) -> None:
        for name in names:
            rank.active.remove(name)
            rank.held.add(name)
            self.seen["yield"] += 1

    def _combine(self, rank: ToyRank, names: list[int]) -> None:
        for name in names:
            rank.held.remove(name)
            rank.backlog.insert(0, name)
            self.seen["combine"] += 1

    def _migrate(self, order: Migrate) -> None:
        source, target = self.ranks[order.source], self.ranks[order.target]
        assert not target.follows and target.leads is None, "moved into a group"
        for name in order.sequences.tolist():
            if name in source.held:
                source.held.remove(name)
            else:
                source.backlog.remove(name)
            ran = name in source.started
            lost = self.fails()
            here = source if lost else target
            self.seen["failed" if lost else "migrate"] += 1
            if not lost:
                source.started.discard(name)
                if ran:
                    target.started.add(name)
            here.says(State.YIELDED if ran else State.WAITING, name)
            here.backlog.append(name)

    def _partition(self, order: Partition) -> None:
        leader = self.ranks[order.leader]
        if order.size == 1:
            assert leader.leads == order.sequence
            for rank in self.groups.pop(order.sequence):
                self.ranks[rank].follows = False
            leader.leads = None
            leader.backlog.insert(0, order.sequence)
            self.seen["alone"] += 1
            return
        group = range(order.first, order.first + order.size)
        assert order.sequence in leader.active and order.leader in group
        assert order.first % order.size == 0
        for rank in group:
            assert not self.ranks[rank].follows
            assert self.ranks[rank].has() == ({order.sequence} if rank == order.leader else set())
        if self.refuses():
            leader.says(State.YIELDED, order.sequence)
            leader.says(State.ACTIVE, order.sequence)
            self.seen["refused"] += 1
            return
        for rank in group:
            self.ranks[rank].follows = rank != order.leader
        leader.active.remove(order.sequence)
        leader.leads = order.sequence
        self.groups[order.sequence] = group
        self.seen["partition"] += 1

    def _run(self, rank: ToyRank, steps: int) -> None:
        for _ in range(steps):
            self._start(rank)
            if rank.leads is not None:
                size = len(self.groups[rank.leads])
                names = [rank.leads]
            else:
                size, names = 1, list(rank.active)
            if not names:
                break
            rank.steps += 1
            rank.tokens += len(names)
            rank.seconds += self.seconds(len(names), size)
            for name in names:
                self.decoded[name] += 1
                if self.decoded[name] >= self.lengths[name]:
                    self._end(rank, name)
            if rank.active and self.hiccups():
                name = rank.active.pop()
                rank.says(State.YIELDED, name)
                rank.backlog.append(name)

    def _start(self, rank: ToyRank) -> None:
        while rank.backlog and len(rank.active) < rank.slots:
            name = rank.backlog[0]
            if name not in rank.started and rank.active and self.free(rank) < self.pages_of(name):
                break
            rank.backlog.pop(0)
            rank.active.append(name)
            rank.started.add(name)
            rank.says(State.ACTIVE, name)

    def _end(self, rank: ToyRank, name: int) -> None:
        if rank.leads == name:
            for one in self.groups.pop(name):
                self.ranks[one].follows = False
            rank.leads = None
        else:
            rank.active.remove(name)
        rank.started.discard(name)
        rank.says(State.FAILED if name % 11 == 5 else State.DONE, name)
        self.ends.append(name)


def live(
    scheduler: Scheduler, toy: Toy, caps: list[int], *, most_rounds: int = 4000,
    watch: Callable[[list, list], None] = lambda events, said: None, order: list[int] | None = None,
) -> int:
    """Run the job to its end, checking all laws in every round -> the rounds it took.  order: in which sequences are
    read."""
    unread = list(range(len(caps))) if order is None else order
    for number in range(most_rounds):
        events: list = toy.reports()
        wanted = scheduler.wanted() if number else 4
        take, unread = unread[:wanted], unread[wanted:]
        if take:
            names = np.array(take)
            events.append(Arrived(names, np.full(len(take), toy.prompt), np.array([caps[i] for i in take])))
        if not unread:
            events.append(InputEnded())
        said = scheduler.handle(events)
        scheduler.check()
        watch(events, said)
        if isinstance(said[0][0], Stop):
            assert sorted(toy.ends) == list(range(len(caps)))
            assert scheduler.ended == len(caps)
            return number
        toy.obey(said)
        owners = [name for rank in toy.ranks for name in rank.has()]
        assert len(owners) == len(set(owners)), "two owners"
    raise AssertionError(f"{most_rounds} rounds and the job has not ended: {scheduler.table.counts}")


def dice(seed: int, chance: float) -> Callable[[], bool]:
    """Return a fair, seeded throw that is true with this chance."""
    source = random.Random(seed)
    return lambda: source.random() < chance
