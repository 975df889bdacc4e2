"""Rank 0's scheduler: events in, instructions out, nothing else (design section 3).

It knows which sequences exist, in which state, and on which rank.  It has no I/O, no clock, no tensor and no prompt;
what a round took is told by the reports.  So a decision is tested as two lists, replayed from the trace, and runs
unchanged in front of a simulator.

Placement: arrived sequences wait in order of arrival; each goes to the rank with the least estimated work that has
room.  A rank is given a little more than it can start at once, so a sequence that ends inside a round is replaced at
once, but not so much that the ranks end unevenly.  Rejected: asking rank 0 at every step (a collective a token), and
dealing the whole job out at the start (one rank would end long after the others).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bgmpi.coroutine import State, StateTable
from bgmpi.errors import InternalError
from bgmpi.primitives import (
    Admit,
    Arrived,
    Event,
    Ids,
    InputEnded,
    Instruction,
    Refused,
    Reported,
    Run,
    Stop,
)


@dataclass(frozen=True, slots=True)
class Rules:
    """The scheduler's constants.

    round_steps: most steps in a round (one page); round_seconds: a round is cut shorter when steps are slow;
    lookahead: sequences a rank may hold beyond what it can start, as a share of its active ones.
    """

    round_steps: int
    page_tokens: int
    round_seconds: float = 2.0
    lookahead: float = 0.25


class Scheduler:
    """Who is where.  sequences: number of sequences of the job; ranks: number of ranks."""

    def __init__(self, sequences: int, ranks: int, rules: Rules) -> None:
        self.table = StateTable(sequences)
        self.prompt: NDArray[np.int32] = np.zeros(sequences, np.int32)
        #: work of each sequence, in decode steps, by a guess: a long cap says little about an answer's real length
        self.effort: NDArray[np.float32] = np.zeros(sequences, np.float32)
        self.ranks = ranks
        self.rules = rules
        self.round_number = 0
        self._queue: NDArray[np.int64] = np.empty(sequences, np.int64)
        self._head = 0
        self._tail = 0
        self._input_ended = False
        self._work: NDArray[np.float64] = np.zeros(ranks)
        self._unstarted: NDArray[np.int64] = np.zeros(ranks, np.int64)
        self._active: NDArray[np.int64] = np.zeros(ranks, np.int64)
        self._reports: list[Reported | None] = [None] * ranks

    # --- questions ------------------------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """Sequences that arrived and have no rank yet."""
        return self._tail - self._head

    @property
    def ended(self) -> int:
        """Sequences that are done or failed."""
        return int(self.table.counts[State.DONE] + self.table.counts[State.FAILED])

    def wanted(self) -> int:
        """Return how many more sequences should be read so that every rank could be filled twice over."""
        if self._input_ended:
            return 0
        room = sum(self._room(report) for report in self._reports if report is not None)
        return max(0, 2 * room + 16 * self.ranks - self.queued)

    # --- the machine ----------------------------------------------------------------------------------------------

    def handle(self, events: Sequence[Event]) -> list[list[Instruction]]:
        """Take the events of one round, in order; -> each rank's instructions, in order."""
        self.round_number += 1
        for event in events:
            match event:
                case Arrived():
                    self._arrive(event)
                case Refused(sequences=names):
                    self.table.move(names, State.FAILED, round_number=self.round_number)
                case InputEnded():
                    self._input_ended = True
                case Reported():
                    self._report(event)
                case _:
                    raise InternalError(f"the scheduler knows no event {type(event).__name__}")
        if self._input_ended and self.ended == len(self.table):
            return [[Stop()] for _ in range(self.ranks)]
        placed = self._place()
        run = Run(self._steps(), more=self.queued > 0)
        return [[Admit(names), run] if len(names) else [run] for names in placed]

    def check(self) -> None:
        """Raise InternalError unless owners and counts agree with the table (laws 3 and 5)."""
        self.table.check()
        state, owner = self.table.state, self.table.owner
        live = np.isin(state, (State.ACTIVE, State.YIELDED, State.MOVING, State.SHARDED))
        if (live & (owner < 0)).any():
            raise InternalError("a live sequence has no owner")
        active = np.bincount(owner[state == State.ACTIVE], minlength=self.ranks)
        if not np.array_equal(active, self._active):
            raise InternalError(f"active sequences per rank: table {active.tolist()}, counted {self._active.tolist()}")

    # --- inside ---------------------------------------------------------------------------------------------------

    def _arrive(self, event: Arrived) -> None:
        names = event.sequences
        self.prompt[names] = event.prompt
        self.effort[names] = event.prompt / 8 + np.minimum(event.cap, 1024)
        self._queue[self._tail : self._tail + len(names)] = names
        self._tail += len(names)

    def _report(self, event: Reported) -> None:
        rank = event.rank
        for moved in event.moves:
            state, names = State(moved.state), moved.sequences
            strangers = names[self.table.owner[names] != rank]
            if len(strangers):
                raise InternalError(
                    f"rank {rank} reports sequence {strangers[0]} of rank {self.table.owner[strangers[0]]}; "
                    f"story: {self.table.story(int(strangers[0]))}"
                )
            waiting = int((self.table.state[names] == State.WAITING).sum())
            self.table.move(names, state, round_number=self.round_number)
            if state is State.ACTIVE:
                self._active[rank] += len(names)
                self._unstarted[rank] -= waiting
            else:
                self._active[rank] -= len(names)
            if state in (State.DONE, State.FAILED):
                self._work[rank] -= float(self.effort[names].sum())
                self.table.owner[names] = -1
        self._reports[rank] = event

    def _room(self, report: Reported) -> int:
        """Sequences a rank may be given now."""
        ahead = max(4, int(self.rules.lookahead * self._active[report.rank]))
        return max(0, report.slots_free + ahead - int(self._unstarted[report.rank]))

    def _place(self) -> list[Ids]:
        reports = [report for report in self._reports if report is not None]
        room = np.zeros(self.ranks, np.int64)
        pages = np.zeros(self.ranks, np.int64)
        for report in reports:
            room[report.rank] = self._room(report)
            pages[report.rank] = report.free_pages + report.pool_pages // 4
        for rank in range(self.ranks):
            pages[rank] -= self._unstarted[rank]
        placed: list[list[int]] = [[] for _ in range(self.ranks)]
        work = self._work.copy()
        while self._head < self._tail and room.any():
            name = int(self._queue[self._head])
            need = -(-int(self.prompt[name]) // self.rules.page_tokens) + 1
            fits = (room > 0) & ((pages >= need) | (self._unstarted + self._active == 0))
            if not fits.any():
                break
            rank = int(np.argmin(np.where(fits, work, np.inf)))
            self._head += 1
            placed[rank].append(name)
            work[rank] += self.effort[name]
            room[rank] -= 1
            pages[rank] -= need
            self._unstarted[rank] += 1
        self._work = work
        answer = [np.array(names, np.int64) for names in placed]
        for rank, names in enumerate(answer):
            self.table.owner[names] = rank
        return answer

    def _steps(self) -> int:
        slowest = max((r.seconds / r.steps for r in self._reports if r is not None and r.steps), default=0.0)
        if slowest <= 0.0:
            return 1
        return int(np.clip(self.rules.round_seconds / slowest, 1, self.rules.round_steps))
