"""Rank 0's scheduler: events in, instructions out, nothing else (design section 3).

It has no I/O, no clock, no tensor and no prompt; what a round took is told by the reports.  So a decision is tested as
two lists, replayed from the trace, and runs unchanged in front of a simulator.  It joins four things that know nothing
of each other: who is where (`roster`), which rank a waiting sequence is given (`placement`), what moves between uneven
ranks (`balance`), and what becomes of the last ones (`long_tail`).  A drill forces primitives that no need calls for.

Placement: a rank is given a little more than it can start at once, so a sequence that ends inside a round is replaced
at once, but not so much that the ranks end unevenly.  Rejected: asking rank 0 at every step (a collective a token),
and dealing the whole job out at the start (one rank would end long after the others).

The instructions of a round, in order: Yield, every Migrate, Combine, every Partition, Admit, Run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bgmpi.balance import Evening, Movable, even_out, uneven_ranks
from bgmpi.coroutine import State, StateTable
from bgmpi.drill import Drill
from bgmpi.errors import ExitCode, InternalError
from bgmpi.long_tail import LongTail, Tail, TailRules
from bgmpi.placement import Room, place
from bgmpi.primitives import (
    NOBODY,
    Admit,
    Arrived,
    Combine,
    Event,
    Ids,
    InputEnded,
    Instruction,
    Migrate,
    Partition,
    Refused,
    Reported,
    Restored,
    Run,
    Stop,
    StopAsked,
    Yield,
)
from bgmpi.roster import ALONE, Roster
from bgmpi.step_times import StepTimes

_STANDING = (State.ACTIVE, State.YIELDED)
_SHUN_ROUNDS = 16
#: A rank is given sequences for this part of its pages beyond the free ones: what may come to be free in a round.
_PAGES_AHEAD = 2
#: A unit counts at most for this part of a rank's pages when it is given to it.
_UNIT_SHARE = 8


@dataclass(frozen=True, slots=True)
class Rules:
    """The scheduler's constants.

    round_steps: most steps in a round (one page); round_seconds: a round is cut shorter when steps are slow;
    lookahead: sequences a rank may hold beyond what it can start, as a share of its active ones; migrate, partition:
    whether sequences may move, and run over groups of ranks; shardable: whether this model can run over a group.
    """

    round_steps: int
    page_tokens: int
    round_seconds: float = 2.0
    lookahead: float = 0.25
    migrate: bool = False
    partition: bool = False
    shardable: bool = True
    evening: Evening = field(default_factory=Evening)
    tail: TailRules = field(default_factory=TailRules)


@dataclass(slots=True)
class _Orders:
    """What one round orders, beside what it admits."""

    yields: list[Ids] = field(default_factory=list)
    moves: list[Migrate] = field(default_factory=list)
    combines: Ids = field(default_factory=lambda: NOBODY)
    groups: list[Partition] = field(default_factory=list)


class Scheduler:
    """Who is where, and what is next.  sequences: number of sequences of the job; ranks: number of ranks; drill: which
    primitives to force."""

    def __init__(self, sequences: int, ranks: int, rules: Rules, drill: Drill | None = None) -> None:
        self.roster = Roster(sequences, ranks)
        self.ranks = ranks
        self.rules = rules
        self._drill = drill or Drill()
        self._queue: NDArray[np.int64] = np.empty(sequences, np.int64)
        self._head = 0
        self._tail = 0
        self._input_ended = False
        self._stop: Stop | None = None
        self._reports: list[Reported | None] = [None] * ranks
        #: the round until which nothing is moved to a rank, because a copy to it failed
        self._shunned: NDArray[np.int64] = np.zeros(ranks, np.int64)
        self._times = StepTimes(rules.tail.shares, rules.tail.lockstep)
        self._size_led: NDArray[np.int64] = np.ones(ranks, np.int64)
        self._long_tail = LongTail(
            rules.tail,
            may_move=rules.migrate or self._drill.migrations > 0,
            may_shard=(rules.partition or self._drill.partitions > 0) and rules.shardable,
            forced_every=self._drill.partitions,
        )

    # --- questions ------------------------------------------------------------------------------------------------

    @property
    def table(self) -> StateTable:
        """State and owner of every sequence."""
        return self.roster.table

    @property
    def round_number(self) -> int:
        """Rounds decided so far."""
        return self.roster.round_number

    @property
    def queued(self) -> int:
        """Sequences that arrived and have no rank yet."""
        return self._tail - self._head

    @property
    def ended(self) -> int:
        """Sequences that are done or failed."""
        return self.roster.ended

    def wanted(self) -> int:
        """Return how many more sequences should be read so that every rank could be filled twice over."""
        if self._input_ended:
            return 0
        return max(0, 2 * int(self._slots(self._known()).sum()) + 16 * self.ranks - self.queued)

    def check(self) -> None:
        """Raise InternalError unless owners, sums and groups agree with the table (laws 3 and 5)."""
        self.roster.check()

    # --- the machine ----------------------------------------------------------------------------------------------

    def handle(self, events: Sequence[Event]) -> list[list[Instruction]]:
        """Take the events of one round, in order; -> each rank's instructions, in order."""
        self.roster.round_number += 1
        self._hear([event for event in events if isinstance(event, Reported)])
        for event in events:
            match event:
                case Arrived():
                    self._arrive(event)
                case Refused(sequences=names):
                    self.roster.move(names, State.FAILED)
                case Restored(done=done, failed=failed):
                    self.table.restore(done, State.DONE)
                    self.table.restore(failed, State.FAILED)
                case InputEnded():
                    self._input_ended = True
                case StopAsked(reason=reason, code=code):
                    self._stop = Stop(reason, code)
                case Reported():
                    pass
                case _:
                    raise InternalError(f"the scheduler knows no event {type(event).__name__}")
        whole = self._input_ended and self.ended == len(self.table)
        # Who wants to stop when all is done has nothing to stop; but that too many rows failed holds to the last.
        if self._stop is not None and not (whole and self._stop.code == ExitCode.STOPPED):
            return [[self._stop] for _ in range(self.ranks)]
        if whole:
            return [[Stop()] for _ in range(self.ranks)]
        orders = self._order()
        placed = self._place()
        if not any(len(names) for names in placed):
            self._even_out(orders)
        self._size_led = self._sizes_led(orders)
        run = Run(self._steps(), more=self.queued > 0)
        return [self._instructions(rank, orders, placed[rank], run) for rank in range(self.ranks)]

    # --- what is heard --------------------------------------------------------------------------------------------

    def _hear(self, reports: list[Reported]) -> None:
        self.roster.report(reports)
        self._times.note(reports, self._size_led)
        for one in reports:
            self._reports[one.rank] = one
            if one.stop:
                self._stop = Stop(f"{one.stop} came to rank {one.rank}", ExitCode.STOPPED)
        for _, target in self.roster.failed_moves:
            self._shunned[target] = self.round_number + _SHUN_ROUNDS
        if self.roster.failed_moves or self.roster.failed_groups:
            self._long_tail.forget()
        lost = int(self.table.counts[State.MOVING])
        if lost and len(reports) == self.ranks:
            name = int(self.roster.of_state(State.MOVING)[0])
            raise InternalError(
                f"{lost} sequences were told to move and no rank reports them, the first is {name}; "
                f"story: {self.table.story(name)}"
            )

    def _arrive(self, event: Arrived) -> None:
        names = event.sequences
        self.roster.arrive(event)
        self._queue[self._tail : self._tail + len(names)] = names
        self._tail += len(names)

    # --- primitives -----------------------------------------------------------------------------------------------

    def _order(self) -> _Orders:
        """Order what the tail and the drill ask for."""
        orders = _Orders()
        known = self._known()
        if len(known) < self.ranks:
            return orders
        held = np.flatnonzero(self.roster.held) if self._drill.yields else NOBODY
        if self._is_tail():
            self._obey(self._long_tail.decide(self._snapshot(known), self._times), orders)
        else:
            self._long_tail.forget()
        if not self._long_tail.under_way:
            self._exercise(known, orders)
        self.roster.held[held] = False
        orders.combines = held
        return orders

    def _is_tail(self) -> bool:
        return self._drained() and len(self.table) - self.ended <= max(self.rules.tail.few, self.ranks)

    def _drained(self) -> bool:
        """Say whether nothing is left to refill any rank, and there are several."""
        counts = self.table.counts
        left = self.queued + int(counts[State.WAITING] + counts[State.MOVING])
        return self._input_ended and left == 0 and self.ranks > 1

    def _snapshot(self, known: list[Reported]) -> Tail:
        """Return the stragglers as they stand."""
        roster, evening = self.roster, self.rules.evening
        names = roster.of_state(State.ACTIVE, State.YIELDED, State.SHARDED)
        owner = self.table.owner[names].astype(np.int64)
        places = [roster.groups.get(name, (rank, 1)) for name, rank in zip(names.tolist(), owner.tolist(), strict=True)]
        apart = any(evening.far(0, rank) for rank in range(1, self.ranks))
        return Tail(
            sequences=names,
            owner=owner,
            active=self.table.state[names] == State.ACTIVE,
            sharded=self.table.state[names] == State.SHARDED,
            first=np.array([first for first, _ in places], np.int64),
            size=np.array([size for _, size in places], np.int64),
            remaining=roster.remaining(names),
            pages=roster.pages(names, self.rules.page_tokens),
            free_pages=self._free_pages(known),
            seconds_a_page=evening.page_bytes / evening.rate if apart else 0.0,
        )

    def _exercise(self, known: list[Reported], orders: _Orders) -> None:
        """Force what the drill names in this round."""
        if not (self._drill.yields or self._drill.migrations):
            return
        for names in self._drill.to_yield(self.round_number, self._by_rank(State.ACTIVE)):
            self._hold(names, orders)
        standing = self._by_rank(State.WAITING, *_STANDING)
        need = [self.roster.pages(names, self.rules.page_tokens) for names in standing]
        pages, closed = self._free_pages(known), self.roster.in_groups()
        self._obey(self._drill.to_migrate(self.round_number, standing, need, pages, closed), orders)

    def _even_out(self, orders: _Orders) -> None:
        """Order what uneven ranks ask for, once the queue cannot even them out."""
        known, roster = self._known(), self.roster
        if not self.rules.migrate or self.ranks == 1 or len(known) < self.ranks or self._is_tail() or orders.moves:
            return
        names = roster.of_state(State.WAITING, *_STANDING)
        state, owner = self.table.state[names], self.table.owner[names].astype(np.int64)
        remaining = roster.remaining(names).astype(np.float64)
        remaining += np.where(state == State.WAITING, (roster.prompt[names] - roster.shared[names]) / 8, 0.0)
        work = np.bincount(owner, weights=remaining, minlength=self.ranks).astype(np.float64)
        if not uneven_ranks(work, self._times.seconds_a_token, self.rules.evening):
            return
        kind = np.select([state == State.WAITING, state == State.YIELDED], [0, 1], 2)
        have = Movable(names, owner, kind, remaining, roster.pages(names, self.rules.page_tokens))
        slots, pages = self._slots(known, ahead=False), self._free_pages(known)
        self._obey(even_out(have, work, slots, pages, self._times.seconds_a_token, self.rules.evening), orders)

    def _obey(self, wanted: Iterable[Migrate | Partition], orders: _Orders) -> None:
        """Note and order moves and partitions; who is active yields before it moves."""
        for one in wanted:
            if isinstance(one, Partition):
                self.roster.regroup(one)
                orders.groups.append(one)
            else:
                self._hold(one.sequences[self.table.state[one.sequences] == State.ACTIVE], orders)
                self.roster.depart(one)
                orders.moves.append(one)

    def _hold(self, names: Ids, orders: _Orders) -> None:
        if len(names):
            self.roster.hold(names)
            orders.yields.append(names)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _known(self) -> list[Reported]:
        return [report for report in self._reports if report is not None]

    def _by_rank(self, *states: State) -> list[Ids]:
        names = self.roster.of_state(*states)
        owner = self.table.owner[names]
        return [names[owner == rank] for rank in range(self.ranks)]

    def _slots(self, known: list[Reported], *, ahead: bool = True) -> NDArray[np.int64]:
        """Return how many sequences each rank may be given now, int64 [ranks]; not `ahead`: only what it can start."""
        count, slots = self.roster.count, np.zeros(self.ranks, np.int64)
        for report in known:
            slots[report.rank] = report.slots_free
            if ahead:
                slots[report.rank] += max(4, int(self.rules.lookahead * count[report.rank, State.ACTIVE]))
        slots -= count[:, State.WAITING] + count[:, State.YIELDED] + self.roster.incoming
        slots[self.roster.in_groups()] = 0
        return np.maximum(slots, 0)

    def _free_pages(self, known: list[Reported]) -> NDArray[np.int64]:
        """Return the pages that each rank could give to a sequence of another rank, int64 [ranks]."""
        pages = np.zeros(self.ranks, np.int64)
        for report in known:
            pages[report.rank] = report.free_pages
        waiting = self.roster.of_state(State.WAITING, State.MOVING)
        for_whom = self.roster.bound_for(waiting)
        need = self.roster.pages(waiting, self.rules.page_tokens)
        pages -= np.bincount(for_whom, weights=need, minlength=self.ranks).astype(np.int64)
        return np.where(self._shunned > self.round_number, 0, pages)

    def _sizes_led(self, orders: _Orders) -> NDArray[np.int64]:
        """Return the size of the group that each rank leads in the round to come, 0 for who only follows or changes."""
        sizes = np.where(self.roster.in_groups(), 0, 1)
        for name, (_, size) in self.roster.groups.items():
            sizes[self.table.owner[name]] = size
        for order in orders.groups:
            if order.size == 1:
                sizes[order.leader] = 0
        return sizes

    def _place(self) -> list[Ids]:
        """Give the first sequences of the queue to ranks -> those of each rank."""
        known, roster = self._known(), self.roster
        slots = self._slots(known)
        count = min(self.queued, int(slots.sum()))
        if not count:
            return [NOBODY] * self.ranks
        names = self._queue[self._head : self._tail]
        begins = _unit_begins(roster.unit[names], count)
        names = names[: begins[-1]]
        pages = np.zeros(self.ranks, np.int64)
        for report in known:
            pages[report.rank] = report.free_pages + report.pool_pages // _PAGES_AHEAD
        pages -= roster.count[:, State.WAITING] + roster.incoming
        need = np.add.reduceat(roster.pages(names, self.rules.page_tokens), begins[:-1])
        # A unit that does not fit at once may wait in a rank's backlog: it must not wait until the rank is empty.
        size = np.diff(begins)
        most = min(report.pool_pages for report in known) // _UNIT_SHARE
        need = np.where(size > 1, np.minimum(need, most), need)
        effort = np.add.reduceat(roster.effort[names].astype(np.float64), begins[:-1])
        idle = roster.owned + roster.incoming == 0
        ranks = place(effort, need, size, Room(roster.work.copy(), slots, pages, idle))
        ranks = np.repeat(ranks, size[: len(ranks)])
        names = names[: len(ranks)]
        self._head += len(names)
        roster.give(names, ranks)
        return [names[ranks == rank] for rank in range(self.ranks)]

    def _steps(self) -> int:
        slowest = max((r.seconds / r.steps for r in self._known() if r.steps), default=0.0)
        if slowest <= 0.0 or self._long_tail.under_way:
            return 1
        steps = int(np.clip(self.rules.round_seconds / slowest, 1, self.rules.round_steps))
        left = len(self.table) - self.ended
        near = 1 < left <= 2 * max(self.rules.tail.few, self.ranks) and self._long_tail.may_act
        if self._drained() and (near or self._long_tail.near):
            return min(steps, self.rules.tail.steps)
        return steps

    def _instructions(self, rank: int, orders: _Orders, placed: Ids, run: Run) -> list[Instruction]:
        """Return one rank's instructions of the round, in their order."""
        said: list[Instruction] = []
        yields = [names[self.table.owner[names] == rank] for names in orders.yields]
        stopped = np.concatenate(yields) if yields else NOBODY
        if len(stopped):
            said.append(Yield(stopped))
        said.extend(orders.moves)
        resumed = orders.combines[self.table.owner[orders.combines] == rank]
        resumed = resumed[self.table.state[resumed] == State.YIELDED]
        if len(resumed):
            said.append(Combine(resumed))
        said.extend(orders.groups)
        if len(placed):
            said.append(Admit(placed))
        said.append(run)
        return said


def _unit_begins(unit: NDArray[np.int32], count: int) -> NDArray[np.int64]:
    """Return where the units of a queue begin that hold its first `count` sequences, and where the last one ends: int64
    [units + 1].  unit: int32 [n], ALONE for who is none's."""
    new = np.ones(len(unit) + 1, bool)
    new[1:-1] = (unit[1:] != unit[:-1]) | (unit[1:] == ALONE)
    begins = np.flatnonzero(new)
    return begins[: int(np.searchsorted(begins, count)) + 1]
