"""The sequence manager of one rank: its active set, their pages, and the backlog that refills it (paper A5).

Pure: it is told what the device drew and answers with what to compute next; it knows no tensor, no text, no clock.
The active set is re-formed all the time: a sequence that ends is replaced at once from the backlog.

Prefill and decode are not told apart.  An active sequence has `known` tokens (prompt and generated) of which the first
`with_kv` are in the cache; a step computes missing ones, single missing tokens first, then chunks within the budget.

Page boundary, in the paper's order: retire the finished, extend or YIELD where pages run short, refill.  The oldest
active sequence is never made to yield, and the backlog is opened strictly oldest first, so every sequence advances
(law 6).  A yielded sequence loses its KV and computes it again; its tokens are kept.

Invariant: one owner of every slot and page, `check` proves it.  Rejected: one object per sequence, because a step then
costs Python time per sequence.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bgmpi.coroutine import State
from bgmpi.errors import InternalError
from bgmpi.paged_kv import PagedKV
from bgmpi.primitives import Moved
from bgmpi.request import Finish

NOT_ENDED = -1


@dataclass(frozen=True, slots=True)
class Entry:
    """A sequence that waits in the backlog.

    tokens: int32 [known], the prompt and what was generated before a yield; prompt: tokens of the prompt;
    most: the longest the sequence may become, tokens.
    """

    sequence: int
    tokens: NDArray[np.int32]
    prompt: int
    most: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes.  S sequences, T tokens.

    slots int64 [S]; first int32 [S + 1], token offsets; before int32 [S], tokens already in the cache; ids, positions
    int64 [T]; emits bool [S], the sequences whose last known token is in this step and that draw a next one.
    """

    slots: NDArray[np.int64]
    first: NDArray[np.int32]
    before: NDArray[np.int32]
    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    emits: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Ended:
    """Sequences that ended in a step: slots int64 [k], finish int8 [k] (`Finish`)."""

    slots: NDArray[np.int64]
    finish: NDArray[np.int8]


class SequenceManager:
    """Active set, pages and backlog of one rank.

    slots: most active sequences; budget: most tokens a step computes (at least `slots`); most_tokens: the longest a
    sequence of this job can become.
    """

    def __init__(self, *, slots: int, pages: int, page_tokens: int, budget: int, most_tokens: int) -> None:
        if budget < slots:
            raise InternalError(f"a step of {budget} tokens cannot hold {slots} decoding sequences")
        self.kv = PagedKV(pages, slots, page_tokens)
        self.budget = budget
        self.sequence: NDArray[np.int64] = np.full(slots, -1, np.int64)
        self.known: NDArray[np.int64] = np.zeros(slots, np.int64)
        self.with_kv: NDArray[np.int64] = np.zeros(slots, np.int64)
        self.prompt: NDArray[np.int64] = np.zeros(slots, np.int64)
        self.most: NDArray[np.int64] = np.zeros(slots, np.int64)
        self.order: NDArray[np.int64] = np.zeros(slots, np.int64)
        self.tokens: NDArray[np.int32] = np.zeros((slots, min(256, most_tokens)), np.int32)
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.wasted_tokens = 0
        self._most_tokens = most_tokens
        self._active: NDArray[np.int64] = np.empty(0, np.int64)
        self._free_slots: list[int] = list(range(slots - 1, -1, -1))
        self._backlog: list[tuple[int, Entry]] = []
        self._computed_before: dict[int, int] = {}
        self._admitted = 0
        self._moves: list[tuple[State, list[int]]] = []

    # --- what rank 0 asks -----------------------------------------------------------------------------------------

    def admit(self, entries: list[Entry]) -> None:
        """Take sequences into the backlog, in this order, behind all earlier ones."""
        for entry in entries:
            if self.kv.pages_for(entry.most) > self.kv.pages:
                raise InternalError(
                    f"sequence {entry.sequence} may need {self.kv.pages_for(entry.most)} pages, the pool has "
                    f"{self.kv.pages}: it should have been refused at admission"
                )
            heapq.heappush(self._backlog, (self._admitted, entry))
            self._admitted += 1

    def take_moves(self) -> tuple[Moved, ...]:
        """Return what became of the sequences since the last call, oldest first."""
        moves = tuple(Moved(int(state), np.array(names, np.int64)) for state, names in self._moves)
        self._moves.clear()
        return moves

    @property
    def active(self) -> NDArray[np.int64]:
        """Slots of the active sequences, oldest first, int64 [S]."""
        return self._active

    @property
    def backlog(self) -> int:
        """Sequences that wait on this rank."""
        return len(self._backlog)

    @property
    def slots_free(self) -> int:
        """Active sequences that could still be added."""
        return len(self._free_slots)

    # --- page boundary --------------------------------------------------------------------------------------------

    def make_room(self) -> list[tuple[int, Entry]]:
        """Refill every reserve; where pages are short, YIELD until each active sequence can make one page of steps.

        -> the yielded (former slot, entry), already back in the backlog.  Longest decoded yields first (paper A5).
        """
        yielded: list[tuple[int, Entry]] = []
        while True:
            self.kv.extend(self._active, self.known[self._active])
            dry = (self.kv.reserved[self._active] == 0) & (self.kv.held[self._active] < self.kv.limit[self._active])
            if not dry.any():
                return yielded
            candidates = self._active[1:]
            if not len(candidates):
                raise InternalError(f"sequence {self.sequence[self._active[0]]} is alone and has no page left")
            decoded = self.known[candidates] - self.prompt[candidates]
            yielded.append(self._yield(int(candidates[np.argmax(decoded)])))

    def refill(self) -> list[tuple[int, Entry]]:
        """Open backlog sequences, oldest first, while slots and pages last -> the (slot, entry) that became active."""
        opened: list[tuple[int, Entry]] = []
        while self._backlog and self._free_slots:
            order, entry = self._backlog[0]
            slot = self._free_slots[-1]
            if not self.kv.open(slot, len(entry.tokens), entry.most, spare=len(self._active) + len(opened)):
                break
            heapq.heappop(self._backlog)
            self._free_slots.pop()
            self._place(slot, order, entry)
            opened.append((slot, entry))
        if opened:
            slots = np.array([slot for slot, _ in opened], np.int64)
            merged = np.concatenate((self._active, slots))
            self._active = merged[np.argsort(self.order[merged], kind="stable")]
            self._moved(State.ACTIVE, self.sequence[slots].tolist())
        return opened

    # --- step -----------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """Choose what the next step computes; None when nothing is active."""
        slots = self._active
        if not len(slots):
            return None
        missing = self.known[slots] - self.with_kv[slots]
        if (missing == 1).all():
            count = missing
        else:
            slots = slots[np.argsort(missing > 1, kind="stable")]
            missing = self.known[slots] - self.with_kv[slots]
            count = np.clip(self.budget - (np.cumsum(missing) - missing), 0, missing)
            slots, count = slots[count > 0], count[count > 0]
        before = self.with_kv[slots]
        first = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(count, out=first[1:])
        which = np.repeat(slots, count)
        positions = np.arange(first[-1]) + np.repeat(before - first[:-1], count)
        ids = self.tokens[which, positions].astype(np.int64)
        known = self.known[slots]
        emits = (before + count == known) & (known < self.most[slots])
        return StepPlan(slots, first, before.astype(np.int32), ids, positions, emits)

    def commit(
        self,
        plan: StepPlan,
        tokens: NDArray[np.int32],
        stopped: NDArray[np.bool_],
        fault: NDArray[np.bool_],
    ) -> Ended:
        """Take what a step drew for `plan.slots[plan.emits]` (each array [E]); -> the sequences that ended by it.

        A faulted sequence gets no token.  The ended ones stay in their slots until `retire`.
        """
        count = np.diff(plan.first)
        self._count_work(plan, count)
        self.with_kv[plan.slots] += count
        drawn = plan.slots[plan.emits]
        good = drawn[~fault]
        self.tokens[good, self.known[good]] = tokens[~fault]
        self.known[good] += 1
        finish = np.full(len(drawn), NOT_ENDED, np.int8)
        finish[self.known[drawn] >= self.most[drawn]] = Finish.LENGTH
        finish[stopped] = Finish.STOP
        finish[fault] = Finish.ERROR
        ended = finish != NOT_ENDED
        going = drawn[~ended]
        crossing = going[self.known[going] > self.kv.held[going].astype(np.int64) * self.kv.page_tokens]
        if len(crossing):
            self.kv.extend(crossing, self.known[crossing])
        silent = plan.slots[~plan.emits]
        silent = silent[self.with_kv[silent] >= self.most[silent]]
        slots = np.concatenate((drawn[ended], silent))
        return Ended(slots, np.concatenate((finish[ended], np.full(len(silent), Finish.LENGTH, np.int8))))

    def retire(self, ended: Ended) -> None:
        """Free the slots and pages of ended sequences."""
        if not len(ended.slots):
            return
        failed = ended.finish == Finish.ERROR
        self._moved(State.DONE, self.sequence[ended.slots[~failed]].tolist())
        self._moved(State.FAILED, self.sequence[ended.slots[failed]].tolist())
        self._leave(ended.slots)

    def check(self) -> None:
        """Raise InternalError unless every law of this rank's sequences holds (laws 3 and 4)."""
        self.kv.check()
        names = self.sequence[self._active]
        waiting = [entry.sequence for _, entry in self._backlog]
        everyone = np.concatenate((names, np.array(waiting, np.int64)))
        if len(np.unique(everyone)) != len(everyone):
            raise InternalError("a sequence is active or waiting twice on this rank")
        if len(self._active) + len(self._free_slots) != len(self.sequence):
            raise InternalError(f"{len(self._active)} active + {len(self._free_slots)} free slots do not fill the rank")
        known, with_kv, most = self.known[self._active], self.with_kv[self._active], self.most[self._active]
        if ((with_kv > known) | (known > most)).any():
            raise InternalError("with_kv <= known <= most does not hold for every active sequence")
        if (self.kv.held[self._active].astype(np.int64) * self.kv.page_tokens < known).any():
            raise InternalError("an active sequence knows more tokens than its pages hold")

    # --- inside ---------------------------------------------------------------------------------------------------

    def _place(self, slot: int, order: int, entry: Entry) -> None:
        size = len(entry.tokens)
        self._widen(entry.most)
        self.tokens[slot, :size] = entry.tokens
        self.sequence[slot] = entry.sequence
        self.known[slot] = size
        self.with_kv[slot] = 0
        self.prompt[slot] = entry.prompt
        self.most[slot] = entry.most
        self.order[slot] = order

    def _widen(self, width: int) -> None:
        have = self.tokens.shape[1]
        if width > have:
            grown = np.zeros((len(self.tokens), min(self._most_tokens, max(width, 2 * have))), np.int32)
            grown[:, :have] = self.tokens
            self.tokens = grown

    def _yield(self, slot: int) -> tuple[int, Entry]:
        sequence, known = int(self.sequence[slot]), int(self.known[slot])
        entry = Entry(sequence, self.tokens[slot, :known].copy(), int(self.prompt[slot]), int(self.most[slot]))
        self._computed_before[sequence] = int(self.with_kv[slot])
        heapq.heappush(self._backlog, (int(self.order[slot]), entry))
        self._moved(State.YIELDED, [sequence])
        self._leave(np.array([slot], np.int64))
        return slot, entry

    def _leave(self, slots: NDArray[np.int64]) -> None:
        self.kv.close(slots)
        self._active = self._active[~np.isin(self._active, slots)]
        self.sequence[slots] = -1
        self._free_slots.extend(slots.tolist())

    def _moved(self, state: State, sequences: list[int]) -> None:
        if not sequences:
            return
        if self._moves and self._moves[-1][0] is state:
            self._moves[-1][1].extend(sequences)
        else:
            self._moves.append((state, list(sequences)))

    def _count_work(self, plan: StepPlan, count: NDArray[np.int32]) -> None:
        prompt = np.clip(self.prompt[plan.slots] - plan.before, 0, count)
        self.prompt_tokens += int(prompt.sum())
        self.generated_tokens += int(plan.emits.sum())
        if not self._computed_before:
            return
        for slot, before, size in zip(plan.slots.tolist(), plan.before.tolist(), count.tolist(), strict=True):
            again = self._computed_before.get(int(self.sequence[slot]))
            if again is not None:
                self.wasted_tokens += min(size, max(0, again - before))
                if before + size >= again:
                    del self._computed_before[int(self.sequence[slot])]
