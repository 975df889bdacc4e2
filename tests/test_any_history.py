"""Every law of the words and decisions after every event of any history that hypothesis can think of.

Three machines: the state table; two ranks' sequence managers that trade sequences and pages; and the scheduler before
ranks that obey it, fail copies, refuse groups and read late.  After the last event each is left alone and must end all
that it has within a bounded number of rounds (law 6), each sequence once (law 5).

The short search is the same in every run; `-m faults` goes on for longer, and elsewhere each time.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from one_rank import TIERS, boundary, entry, make
from ranks_for_tests import Toy

from bgmpi.backlog import Entry
from bgmpi.coroutine import IllegalMove, State, StateTable, legal_moves
from bgmpi.drill import Drill
from bgmpi.errors import InternalError
from bgmpi.eviction import Hold
from bgmpi.long_tail import TailRules
from bgmpi.primitives import Arrived, Event, InputEnded, Migrate, Partition, Refused, Restored, Stop
from bgmpi.request import Finish
from bgmpi.scheduler import Rules, Scheduler
from bgmpi.sequence_manager import SequenceManager

NAMES = 8
#: To make a history shorter takes minutes; the long search does that.
WITHOUT_SHRINKING = (Phase.explicit, Phase.generate)
JOBS = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), min_size=2, max_size=6)
LENGTHS = st.sampled_from([[], [1], [9] * 12 + [110], [100, 120, 90], [60] * 5])
some = st.lists(st.integers(0, NAMES - 1), unique=True, max_size=NAMES)


def ids(names: Any) -> np.ndarray:
    return np.array(sorted(names) if isinstance(names, set) else list(names), np.int64)


class TableLife(RuleBasedStateMachine):
    """The state table beside a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.table = StateTable(NAMES, story_moves=5)
        self.model = [State.WAITING] * NAMES
        self.last: dict[int, str] = {}

    @rule(names=some, data=st.data())
    def move(self, names: list[int], data: st.DataObject) -> None:
        targets = [data.draw(st.sampled_from(State)) for _ in names]
        legal = all(legal_moves()[self.model[name], target] for name, target in zip(names, targets, strict=True))
        before = self.table.state.copy()
        if not legal:
            with pytest.raises(IllegalMove, match="is not a legal move"):
                self.table.move(ids(names), ids(targets), round_number=3)
            assert np.array_equal(before, self.table.state)
            return
        self.table.move(ids(names), ids(targets), round_number=3)
        for name, target in zip(names, targets, strict=True):
            self.last[name] = f"{self.model[name].name.lower()} -> {target.name.lower()}"
            self.model[name] = target
        for name in names[-5:]:
            assert self.table.story(name).endswith(self.last[name])

    @rule(names=some, owner=st.integers(-1, 2))
    def give(self, names: list[int], owner: int) -> None:
        self.table.owner[names] = owner

    @rule(names=some, end=st.sampled_from(State))
    def restore(self, names: list[int], end: State) -> None:
        fresh = all(self.model[name] is State.WAITING and self.table.owner[name] < 0 for name in names)
        if not fresh or end not in (State.DONE, State.FAILED):
            with pytest.raises(InternalError, match="cannot be restored"):
                self.table.restore(ids(names), end)
            return
        self.table.restore(ids(names), end)
        for name in names:
            self.model[name] = end

    @invariant()
    def the_counts_are_those_of_the_table(self) -> None:
        self.table.check()
        assert self.table.state.tolist() == [int(state) for state in self.model]
        assert self.table.counts.tolist() == [self.model.count(state) for state in State]


class RanksLife(RuleBasedStateMachine):
    """Two ranks of one node that compute made-up tokens, trade sequences, and follow each other.

    `table` is what rank 0 would know: orders are noted when they are given, all else is what the ranks report.
    """

    @initialize(tiers=st.tuples(st.sampled_from(sorted(TIERS)), st.sampled_from(sorted(TIERS))),
                slots=st.integers(1, 4), more=st.integers(0, 9), budget=st.integers(4, 12), hold=st.sampled_from(Hold),
                first=st.one_of(st.tuples(JOBS, JOBS), st.tuples(st.just([(9, 30)]), st.just([]))))
    def open(self, tiers: tuple[str, str], slots: int, more: int, budget: int, hold: Hold,
             first: tuple[list[tuple[int, int]], list[tuple[int, int]]]) -> None:
        self.ranks = [
            make(slots=slots, pages=15 + more, budget=budget, hold=hold, first=1000 * rank, **TIERS[name])
            for rank, name in enumerate(tiers)
        ]
        self.table = StateTable(500)
        self.most: dict[int, int] = {}
        self.prompt: dict[int, int] = {}
        self.stops: dict[int, int] = {}
        self.ended: dict[int, tuple[int, Finish]] = {}
        #: sequences of which the other rank has a copy in step
        self.copies: set[int] = set()
        for rank, jobs in enumerate(first):
            self.admit(rank, jobs)
            self.run(rank, 2, 0, 0)

    # --- what happens -----------------------------------------------------------------------------------------------

    @rule(rank=st.integers(0, 1), jobs=JOBS)
    def admit(self, rank: int, jobs: list[tuple[int, int]]) -> None:
        self.report()
        for prompt, new in jobs:
            name = len(self.most)
            if self.ranks[rank].takes(prompt + new):
                self.most[name], self.prompt[name] = prompt + new, prompt
                self.ranks[rank].admit([entry(name, prompt, new)])
                self.table.owner[name] = rank

    @rule(rank=st.integers(0, 1), steps=st.integers(1, 4), stops=st.integers(0, 255), faults=st.integers(0, 255))
    def run(self, rank: int, steps: int, stops: int, faults: int) -> None:
        manager = self.ranks[rank]
        boundary(manager)
        for step in range(steps):
            if manager.plan() is None:
                break
            self.step(rank, stops if stops > 200 and not step else 0, faults if faults > 240 and not step else 0)
            manager.refill()
            manager.promoted(manager.promote())

    def step(self, rank: int, stops: int, faults: int) -> None:
        """Make a step; bit i of stops and faults is about the i-th that draws."""
        manager = self.ranks[rank]
        plan = manager.plan()
        assert plan is not None
        active, slots = manager.active_set, plan.slots[plan.emits]
        tokens = (active.sequence[slots] * 1000 + active.known[slots]).astype(np.int32)
        bits = np.arange(len(slots))
        fault = (faults >> bits & 1).astype(bool)
        stop = (stops >> bits & 1).astype(bool) & ~fault
        known = {int(active.sequence[slot]): int(active.known[slot]) for slot in plan.slots}
        ended = manager.commit(plan, tokens, stop, fault)
        for slot, finish in zip(ended.slots.tolist(), ended.finish.tolist(), strict=True):
            name, have = int(active.sequence[slot]), int(active.known[slot])
            right = np.concatenate((np.arange(self.prompt[name]), name * 1000 + np.arange(self.prompt[name], have)))
            assert active.tokens[slot, :have].tolist() == right.tolist()
            assert have == known[name] + (finish != Finish.ERROR and self.most[name] > self.prompt[name])
            if name in manager._silent:
                self.copies.remove(name)
                continue
            assert name not in self.ended, "ended twice"
            self.ended[name] = have, Finish(finish)
        manager.retire(ended)

    @rule(rank=st.integers(0, 1), mask=st.integers(1, 15))
    def suspend(self, rank: int, mask: int) -> None:
        self.report()
        manager = self.ranks[rank]
        names = [name for place, name in enumerate(self.active(rank)) if mask >> place % 4 & 1]
        self.hold(manager, names)

    def hold(self, manager: SequenceManager, names: list[int]) -> None:
        self.table.move(ids(names), State.YIELDED)
        if manager.places.device is not None:
            slots = manager.active_set.slots_of(ids(names))
            manager.places.end_demotion(slots[manager.places.resident[slots]])
        manager.suspend(ids(names))

    @rule(rank=st.integers(0, 1), mask=st.integers(1, 15))
    def combine(self, rank: int, mask: int) -> None:
        held = self.ranks[rank].backlog._held
        self.ranks[rank].backlog.combine(ids(name for place, name in enumerate(list(held)) if mask >> place % 4 & 1))

    @rule(source=st.integers(0, 1), mask=st.integers(1, 15), way=st.sampled_from(["trade", "copy", "fail"]))
    def migrate(self, source: int, mask: int, way: str) -> None:
        """As bgmpi/migration.py does it: leave, claim, take over, let go; or stay.  Who is active yields before."""
        self.report()
        mine, theirs = self.ranks[source], self.ranks[1 - source]
        active = self.active(source)
        everyone = [*active, *(one.sequence for one in mine.backlog)]
        names = [name for place, name in enumerate(everyone) if mask >> place % 4 & 1]
        self.hold(mine, [name for name in names if name in active])
        self.table.move(ids(names), State.MOVING)
        for going in mine.leave(ids(names)):
            pages = None
            if way != "fail" and theirs.takes(going.most):
                pages = theirs.kv.claim(len(going.home), theirs.kv.growing(theirs.active))
            if pages is None:
                mine.stay(going.sequence)
                continue
            given = pages if way == "trade" else np.empty(0, np.int32)
            if way == "trade":
                theirs.kv.trade(given=pages, taken=going.home)
                pages = going.home
            parcel = (going.sequence, going.tokens, going.prompt, going.most, going.with_kv, pages)
            theirs.arrive(Entry(*parcel, started=going.started))
            self.table.owner[going.sequence] = 1 - source
            mine.gone(going.sequence, given)

    @rule(leader=st.integers(0, 1), refused=st.booleans())
    def partition(self, leader: int, refused: bool) -> None:
        """The other rank follows the leader's only sequence for a step and lets go of it; or a group is refused."""
        self.report()
        here, there = self.ranks[leader], self.ranks[1 - leader]
        if len(self.active(leader)) != 1 or list(here.backlog):
            return
        (name,) = self.active(leader)
        self.table.move(ids([name]), State.SHARDED)
        slot = int(here.active_set.slots_of(ids([name]))[0])
        known, most = int(here.active_set.known[slot]), int(here.active_set.most[slot])
        copy = Entry(name, here.active_set.tokens[slot, :known].copy(), self.prompt[name], most, started=True)
        if refused or not there.takes(most) or list(there.backlog) or not there.follow(copy):
            here.refused(name)
            return
        self.copies.add(name)
        there.check()
        for rank in (leader, 1 - leader):
            boundary(self.ranks[rank])
            if self.ranks[rank].plan() is not None:
                self.step(rank, 0, 0)
        if name in self.copies:
            self.copies.remove(name)
            there.forget(name)
        if name in self.ended:
            return
        self.table.move(ids([name]), State.YIELDED)
        here.resumed(name)

    # --- what holds -------------------------------------------------------------------------------------------------

    def active(self, rank: int) -> list[int]:
        manager = self.ranks[rank]
        found: list[int] = manager.active_set.sequence[manager.active].tolist()
        return found

    def report(self) -> None:
        """Tell rank 0 what became of all: it knows then exactly who is where."""
        for rank, manager in enumerate(self.ranks):
            for moved in manager.take_moves():
                assert (self.table.owner[moved.sequences] == rank).all(), "told by a rank that does not own it"
                self.table.move(moved.sequences, State(moved.state))
            assert (self.table.state[self.active(rank)] == State.ACTIVE).all()
            waiting = ids(one.sequence for one in manager.backlog)
            started = np.array([one.started for one in manager.backlog], bool)
            right = np.where(started, State.YIELDED, State.WAITING)
            assert np.array_equal(self.table.state[waiting], right)

    @invariant()
    def every_law_of_both_ranks_holds(self) -> None:
        if not hasattr(self, "ranks"):
            return
        owned: list[int] = []
        for manager in self.ranks:
            manager.check()
            owned += [one.sequence for one in manager.backlog]
            owned += manager.active_set.sequence[manager.active].tolist()
        assert sorted(owned) == sorted(self.most.keys() - self.ended.keys()), "a sequence has no owner or two"
        first, second = (self.numbers(manager) for manager in self.ranks)
        assert not first & second, "a page number has two owners"
        assert first | second == {*range(first_pages := self.ranks[0].kv.pages), *range(1000, 1000 + first_pages)}

    def numbers(self, manager: SequenceManager) -> set[int]:
        kv = manager.kv
        parked = [int(page) for one in manager.backlog for page in one.home]
        assert kv.parked == len(parked)
        return {*kv._stack[: kv._unheld].tolist(), *kv.table[kv.table >= 0].tolist(), *parked}

    def teardown(self) -> None:
        if not hasattr(self, "ranks"):
            return
        for rank, manager in enumerate(self.ranks):
            manager.backlog.combine(ids(list(manager.backlog._held)))
            rounds = 40 + sum(self.most.values())
            while len(self.active(rank)) or manager.backlog:
                boundary(manager)
                for _ in range(4):
                    if manager.plan() is not None:
                        self.step(rank, 0, 0)
                rounds -= 1
                assert rounds, f"{len(manager.backlog)} sequences wait for ever"
            for pool in (manager.places.home, manager.places.device, manager.places.disk):
                assert pool is None or pool.free == pool.pages
        self.report()
        assert self.ended.keys() == self.most.keys()
        for name, (known, finish) in self.ended.items():
            assert known == self.most[name] or finish in (Finish.STOP, Finish.ERROR)
            assert self.table.state[name] == (State.FAILED if finish is Finish.ERROR else State.DONE)


class JobLife(RuleBasedStateMachine):
    """The scheduler before ranks that obey it and complain of everything illegal (ranks_for_tests.py)."""

    @initialize(lengths=st.one_of(st.lists(st.integers(1, 120), min_size=8, max_size=30), LENGTHS),
                ranks=st.integers(1, 6), slots=st.integers(1, 6), pages=st.integers(4, 60), needed=st.booleans(),
                every=st.tuples(*[st.sampled_from([2, 1, 3, 4, 0])] * 3),
                steps=st.sampled_from([1, 4, 16]), before=st.lists(st.sampled_from([0, 0, 0, 1, 2]), max_size=30),
                seed=st.integers(0, 1000))
    def open(self, lengths: list[int], ranks: int, slots: int, pages: int, every: tuple[int, int, int], needed: bool,
             steps: int, before: list[int], seed: int) -> None:
        """before: of each sequence, whether an earlier attempt left nothing, an answer, or an error."""
        self.chance = {"fails": 0.2, "refuses": 0.4, "hiccups": 0.05}
        source = random.Random(seed)
        throws = {name: lambda name=name: source.random() < self.chance[name] for name in self.chance}
        self.toy = Toy(lengths, ranks, slots, pages, **throws)
        rules = Rules(round_steps=steps, page_tokens=64, migrate=needed, partition=needed,
                      tail=TailRules(shares={2: 0.6, 3: 0.5, 4: 0.4}))
        self.scheduler = Scheduler(len(lengths), ranks, rules, Drill(*every))
        left = [*before, *[0] * len(lengths)][: len(lengths)]
        self.restored = [name for name in range(len(lengths)) if left[name]]
        self.unread = [name for name in range(len(lengths)) if not left[name]]
        self.refused: list[int] = []
        self.pending: list[Event] = []
        if self.restored:
            self.pending.append(Restored(ids(n for n in self.restored if left[n] == 1),
                                         ids(n for n in self.restored if left[n] == 2)))
        self.ended = self.over = False
        self.rounds = 0

    @precondition(lambda self: not self.over and self.unread)
    @rule(count=st.integers(1, 8), begun=st.booleans())
    def read(self, count: int, begun: bool) -> None:
        """Rows come, now or many rounds late; of some an earlier attempt has the first tokens."""
        names, self.unread = self.unread[:count], self.unread[count:]
        decoded = [self.toy.lengths[name] // 2 if begun else 0 for name in names]
        for name, tokens in zip(names, decoded, strict=True):
            self.toy.decoded[name] = tokens
        size = np.full(len(names), 1)
        self.pending.append(Arrived(ids(names), size * self.toy.prompt, size * 130, ids(decoded)) if begun else
                            Arrived(ids(names), size * self.toy.prompt, size * 130))

    @precondition(lambda self: not self.over and self.unread)
    @rule(count=st.integers(1, 3))
    def refuse(self, count: int) -> None:
        names, self.unread = self.unread[:count], self.unread[count:]
        self.refused += names
        self.pending.append(Refused(ids(names)))

    @precondition(lambda self: not self.over and not self.unread and not self.ended)
    @rule()
    def end_input(self) -> None:
        self.ended = True
        self.pending.append(InputEnded())

    @rule(count=st.integers(1, 8))
    def round(self, count: int) -> None:
        for _ in range(count):
            if not self.over:
                self.one_round()

    def one_round(self) -> None:
        events = [*self.toy.reports(), *self.pending]
        self.pending = []
        said = self.scheduler.handle(events)
        self.rounds += 1
        self.scheduler.check()
        if any(isinstance(one, Stop) for one in said[0]):
            assert [[type(one) for one in rank] for rank in said] == [[Stop]] * len(said)
            self.over = True
            return
        owner = self.scheduler.table.owner
        for rank in self.toy.ranks:
            assert all(owner[name] == rank.rank for name in rank.has()), "rank 0 and a rank differ about an owner"
        busy = {one.target for one in said[0] if isinstance(one, Migrate)}
        for one in said[0]:
            if isinstance(one, Partition) and one.size > 1:
                assert not busy & set(range(one.first, one.first + one.size)), "moved into a group that is made"
        self.toy.obey(said)
        owners = [name for rank in self.toy.ranks for name in rank.has()]
        assert len(owners) == len(set(owners)), "two owners"

    @invariant()
    def no_sequence_is_lost(self) -> None:
        if not hasattr(self, "toy"):
            return
        here = {name for rank in self.toy.ranks for name in rank.has()}
        counted = len(here) + len(self.toy.ends) + self.scheduler.queued
        waits = sum(len(one.sequences) for one in self.pending if isinstance(one, Arrived | Refused))
        refused_told = len(self.refused) - sum(len(one.sequences) for one in self.pending if isinstance(one, Refused))
        assert counted + refused_told + waits + len(self.unread) + len(self.restored) == len(self.toy.lengths)

    def teardown(self) -> None:
        if not hasattr(self, "toy"):
            return
        while self.unread:
            self.read(8, False)
        if not self.ended:
            self.end_input()
        self.round(150)
        self.chance = dict.fromkeys(self.chance, 0.0)
        bound = self.rounds + 100 + 3 * sum(self.toy.lengths)
        while not self.over:
            self.one_round()
            assert self.rounds < bound, f"not ended: {self.scheduler.table.counts}"
        assert sorted([*self.toy.ends, *self.refused, *self.restored]) == list(range(len(self.toy.lengths)))
        assert self.scheduler.ended == len(self.toy.lengths)


LIVES = {"the state table": TableLife, "two ranks": RanksLife, "a job": JobLife}
EXAMPLES = {"the state table": 20, "two ranks": 40, "a job": 40}


@pytest.mark.parametrize("life", LIVES)
def test_all_laws_hold_after_every_event_and_everything_ends(life: str) -> None:
    quick = settings(max_examples=EXAMPLES[life], stateful_step_count=25, phases=WITHOUT_SHRINKING)
    run_state_machine_as_test(LIVES[life], settings=quick)


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("life", LIVES)
def test_all_laws_hold_in_long_histories(life: str) -> None:
    long = settings(max_examples=20 * EXAMPLES[life], stateful_step_count=80, derandomize=False)
    run_state_machine_as_test(LIVES[life], settings=long)
