"""The sequence manager of one rank: its active set, their pages, and the backlog that refills it (paper A5).

Pure: it is told what the device drew and answers with what to compute next; it knows no tensor, no text, no clock.
The active set is re-formed all the time: a sequence that ends is replaced at once from the backlog.

Page boundary, in the paper's order: wait for pending appends (executor), retire the finished, extend or YIELD where
pages run short (`evict`, as often as it names somebody), refill and promote.  The oldest active sequence is never made
to yield, and the backlog is opened strictly oldest first, so every sequence advances (law 6).  Who is more urgent is
older; rank 0 hands out no sequence that is more urgent than an earlier one, unless by MIGRATE, so nobody is overtaken
for ever (`fairness`).

Who yields where pages run short, and what becomes of its KV, is `eviction`'s matter.

What prompts share is computed once (`shared_prefixes`).  Who would begin with a prefix that another computes is passed
over until it is there; the pages that it will need stay free for it, so passing over is no overtaking.

Invariant: one owner of every slot and page, `check` proves it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bgmpi.active_set import ActiveSet
from bgmpi.backlog import NO_PAGES, Backlog, Entry
from bgmpi.coroutine import State
from bgmpi.errors import InternalError
from bgmpi.eviction import Eviction, Hold, Way, choose_spills, choose_victim
from bgmpi.fairness import age_key, level_of
from bgmpi.kv_places import KvPlaces
from bgmpi.paged_kv import RESERVE, Pages
from bgmpi.primitives import Ids, Moved
from bgmpi.request import Finish
from bgmpi.shared_prefixes import NO_ONE, SharedPrefixes, Start
from bgmpi.step_plan import StepPlan, plan_step
from bgmpi.token_counts import TokenCounts

NOT_ENDED = -1


@dataclass(frozen=True, slots=True)
class Ended:
    """Sequences that ended in a step: slots int64 [k], finish int8 [k] (`Finish`).  published: a prefix came to be
    shared, so some that were passed over may begin."""

    slots: NDArray[np.int64]
    finish: NDArray[np.int8]
    published: bool = False


class SequenceManager:
    """Active set, pages and backlog of one rank.  full: KV memory had no room for who waits when it was last refilled.

    slots: most active sequences; budget: most tokens a step computes (at least `slots`); most_tokens: the longest a
    sequence of this job can become.
    """

    def __init__(
        self, places: KvPlaces, *, slots: int, budget: int, most_tokens: int, hold: Hold = Hold.SHORTEST,
    ) -> None:
        if budget < slots:
            raise InternalError(f"a step of {budget} tokens cannot hold {slots} decoding sequences")
        self.places = places
        self.kv = places.home
        self.prefixes = SharedPrefixes(places.home)
        self.budget = budget
        self.backlog = Backlog()
        self.active_set = ActiveSet(slots, most_tokens)
        self.tokens = TokenCounts()
        self.full = False
        self._copies: list[tuple[int, int]] = []
        self._hold = hold
        self._admitted = 0
        self._moves: list[tuple[State, list[int]]] = []
        self._silent: set[int] = set()

    # --- what rank 0 asks -----------------------------------------------------------------------------------------

    def admit(self, entries: list[Entry]) -> None:
        """Take sequences into the backlog, in this order, behind all earlier ones that are as urgent.  What they share
        has heard of them (`SharedPrefixes.enter`)."""
        for entry in entries:
            if not self.places.fits(entry.most):
                raise InternalError(
                    f"sequence {entry.sequence} may need {self.kv.pages_for(entry.most)} pages, the pool has "
                    f"{self.kv.pages}: it should have been refused at admission"
                )
            self.backlog.push(self._next_key(entry), entry)

    def arrive(self, entry: Entry) -> None:
        """Take over a sequence from another rank, its KV already in pages of this rank; told in the next report."""
        self.admit([entry])
        self._moved(State.YIELDED if entry.started else State.WAITING, [entry.sequence])

    def takes(self, most: int) -> bool:
        """Say whether a sequence that may become `most` tokens long can run on this rank."""
        return self.places.fits(most)

    def leave(self, sequences: Ids) -> list[Entry]:
        """Let sequences that wait or are held begin to leave -> their entries, in the order named.

        KV on disk cannot be got from elsewhere: those compute it again.
        """
        return [self._without_disk(entry) for entry in self.backlog.leave(sequences)]

    def _without_disk(self, entry: Entry) -> Entry:
        if not len(entry.disk):
            return entry
        self._give_up(entry)
        return self.backlog.strip_leaving(entry.sequence)

    def gone(self, sequence: int, given: Pages) -> None:
        """Let go of a sequence that another rank has taken; given: pages for those it took without a copy."""
        entry = self.backlog.gone(sequence)
        self.tokens.forget(sequence)
        self.prefixes.leave(sequence)
        if len(given):
            self.kv.trade(given=entry.home, taken=given)
        self.kv.release(given if len(given) else entry.home)

    def stay(self, sequence: int) -> None:
        """Keep a sequence that began to leave and could not; told in the next report."""
        entry = self.backlog.stay(sequence)
        self._moved(State.YIELDED if entry.started else State.WAITING, [sequence])

    def suspend(self, sequences: Ids) -> NDArray[np.int64]:
        """YIELD these active sequences, keep their KV at home and hold them; -> their former slots.

        Those resident on a device must have been demoted before.  Rank 0 ordered it, so it is not told.
        """
        slots = self.active_set.slots_of(sequences)
        for slot in slots.tolist():
            order, entry = self._lift(slot, keep=True)
            self.backlog.hold(order, entry)
        return slots

    def sharded(self, sequence: int) -> None:
        """Note that a group computes a sequence from now on: its pages are whole up to here only, so it carries no
        prefix."""
        self.prefixes.put_down(sequence)

    def resumed(self, sequence: int) -> None:
        """Tell that an active sequence runs alone again."""
        self._moved(State.ACTIVE, [sequence])

    def refused(self, sequence: int) -> None:
        """Tell that an active sequence could not be sharded and runs alone."""
        self._moved(State.YIELDED, [sequence])
        self._moved(State.ACTIVE, [sequence])

    def follow(self, entry: Entry) -> bool:
        """Make a copy of a sequence active that another rank leads: it runs in step with it and is never told of.

        False, and no change, when something else is active or waits, or there is no room.
        """
        if len(self.active_set) or self.backlog:
            return False
        if not self.places.open(self.active_set.next_free(), entry, spare=0):
            return False
        self._silent.add(entry.sequence)
        self.active_set.place(self._next_key(entry), entry)
        return True

    def forget(self, sequence: int) -> int:
        """Drop an active copy that `follow` took; -> its former slot."""
        slot = int(self.active_set.slots_of(np.array([sequence], np.int64))[0])
        self._leave(np.array([slot], np.int64))
        self._silent.discard(sequence)
        return slot

    def take_moves(self) -> tuple[Moved, ...]:
        """Return what became of the sequences since the last call, oldest first."""
        moves = tuple(Moved(int(state), np.array(names, np.int64)) for state, names in self._moves)
        self._moves.clear()
        return moves

    @property
    def active(self) -> NDArray[np.int64]:
        """Slots of the active sequences, oldest first, int64 [S]."""
        return self.active_set.slots

    # --- page boundary --------------------------------------------------------------------------------------------

    def evict(self) -> Eviction | None:
        """Name who must make room next; None when each active sequence can make one page of steps.

        Call `evicted` when their bytes have moved, then ask again.
        """
        slots, places, known = self.active, self.places, self.active_set.known
        places.grow(slots, known[slots])
        dry = int(self.kv.dry(slots).sum())
        if places.disk is not None and (
            spill := choose_spills(self.active_set, places, max(dry, self._pressed()))
        ):
            return spill
        if dry:
            while self._strip():
                places.grow(slots, known[slots])
                if not self.kv.dry(slots).any():
                    break
            else:
                return Eviction(Way.GIVE_UP, choose_victim(self.active_set, slots[1:], self._hold))
        if places.device is not None:
            resident = slots[places.resident[slots]]
            if places.device.dry(resident).any():
                others = resident[1:] if len(resident) > 1 else resident
                return Eviction(Way.DEMOTE, choose_victim(self.active_set, others, self._hold))
        return None

    def evicted(self, eviction: Eviction) -> list[int]:
        """Commit an eviction whose bytes have moved; -> the slots that have no sequence any more."""
        slots = eviction.slots
        match eviction.way:
            case Way.SPILL:
                self.places.end_spill(slots)
                for sequence in self.active_set.sequence[slots].tolist():
                    self.prefixes.put_down(sequence)
            case Way.DEMOTE:
                self.places.end_demotion(slots)
            case Way.GIVE_UP:
                for slot in slots.tolist():
                    self.backlog.push(*self._lift(slot, keep=False))
                vacated: list[int] = slots.tolist()
                return vacated
        return []

    def refill(self) -> list[tuple[int, Entry]]:
        """Open backlog sequences, oldest first, while slots and pages last -> the (slot, entry) that became active."""
        opened: list[tuple[int, Entry]] = []
        passed: list[tuple[int, Entry]] = []
        active = self.active_set
        spare = self.kv.growing(active.slots)
        self.full = False
        while self.backlog and active.free > len(passed):
            order, entry = self.backlog.first()
            start = self._start(entry)
            if start is None:
                passed.append(self.backlog.pop())
                spare += self._pages_ahead(entry)
                continue
            crowded = self._could_start() * self.kv.pages_for(entry.most) > self.kv.free
            begun = replace(entry, with_kv=start.with_kv)
            if not self.places.open(active.next_free(), begun, spare, crowded=crowded, borrowed=start.borrowed):
                if len(active) or not self._strip():
                    self.full = True
                    break
                continue  # nobody would ever make room: what younger ones keep must go
            self.backlog.pop()
            slot = active.place(order, begun)
            self._begin(slot, entry, start)
            opened.append((slot, entry))
            spare += self.kv.growing(np.array([slot]))
        for order, entry in passed:
            self.backlog.push(order, entry)
        self._moved(State.ACTIVE, [entry.sequence for _, entry in opened])
        if self.publish():
            opened += self.refill()
        return opened

    def publish(self) -> bool:
        """Let others share what carriers have reached; True when somebody may begin now who could not before."""
        active, any_new = self.active_set, False
        for sequence, slot in self.prefixes.carriers():
            while self.prefixes.reached(sequence, int(active.with_kv[slot])):
                spare = self.kv.growing(active.slots)
                copied = self.prefixes.publish(sequence, active.tokens[slot], spare)
                if copied is not None:
                    self._copies.append(copied)
                any_new = True
        return any_new

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the pages at home that must be copied before the next step, in this order: from, to."""
        copies, self._copies = self._copies, []
        return copies

    def recall(self) -> NDArray[np.int64]:
        """Choose sequences whose pages on disk should come home, and hold pages for them: in the tail, when nobody
        waits and the home has room for what all active ones may still need.

        -> slots int64 [k]; call `recalled` when the bytes are there.
        """
        places, slots = self.places, self.active
        if places.disk is None or self.backlog or not places.spills(slots).any():
            return slots[:0]
        ahead = self.kv.limit[slots] - self.kv.base[slots] - self.kv.held[slots] - self.kv.reserved[slots]
        chosen = [slot for slot in slots[places.spills(slots)].tolist() if places.begin_recall(slot, int(ahead.sum()))]
        return np.array(chosen, np.int64)

    def recalled(self, slots: NDArray[np.int64]) -> None:
        """Commit a recall whose bytes have moved."""
        self.places.end_recall(slots)

    def promote(self) -> NDArray[np.int64]:
        """Choose streamed sequences, oldest first, whose KV should come to the device, and hold pages for it.

        -> slots int64 [k]; call `promoted` when the bytes are there.
        """
        device, slots, active = self.places.device, self.active, self.active_set
        chosen: list[int] = []
        if device is None:
            return slots[:0]
        ready = slots[~self.places.resident[slots] & ~self.places.spills(slots)]
        ready = ready[(active.missing(ready) == 1) & (device.held[ready] == 0)]
        spare = device.growing(slots[self.places.resident[slots]])
        for slot in ready.tolist():
            if not self.places.begin_promotion(slot, int(active.known[slot]), int(active.most[slot]), spare):
                break
            spare += device.growing(np.array([slot]))
            chosen.append(slot)
        return np.array(chosen, np.int64)

    def promoted(self, slots: NDArray[np.int64]) -> None:
        """Commit a promotion whose bytes have moved."""
        self.places.end_promotion(slots, self.active_set.with_kv[slots])

    # --- step -----------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """Choose what the next step computes; None when nothing can run."""
        return plan_step(self.active_set, self.places, self.budget)

    def runs_dry(self, planned: int) -> bool:
        """Say whether all that is here could not fill the step behind one of `planned` tokens."""
        active = self.active_set
        left = int(active.missing(active.slots).sum()) - planned + len(active)
        for entry in self.backlog.queued():
            if left >= self.budget:
                break
            left += len(entry.tokens) - (entry.prefixes[-1].depth if entry.prefixes else 0)
        return left < self.budget

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
        active, count = self.active_set, np.diff(plan.first)
        if not self._silent:  # else its leader counts
            prompt, names = active.prompt[plan.slots], active.sequence[plan.slots]
            self.tokens.step(names, prompt, plan.before, count, int(plan.emits.sum()))
        active.with_kv[plan.slots] += count
        drawn = plan.slots[plan.emits]
        good = drawn[~fault]
        active.tokens[good, active.known[good]] = tokens[~fault]
        active.known[good] += 1
        finish = np.full(len(drawn), NOT_ENDED, np.int8)
        finish[active.known[drawn] >= active.most[drawn]] = Finish.LENGTH
        finish[stopped] = Finish.STOP
        finish[fault] = Finish.ERROR
        ended = finish != NOT_ENDED
        going = drawn[~ended]
        crossing = going[active.known[going] > self.kv.end(going)]
        if len(crossing):
            self.places.grow(crossing, active.known[crossing])
        streamed = plan.slots[plan.resident :]
        if len(streamed) and self.places.disk is not None:
            self.places.end_spill(streamed[self.places.spills(streamed)])
        silent = plan.slots[~plan.emits]
        silent = silent[active.with_kv[silent] >= active.most[silent]]
        slots = np.concatenate((drawn[ended], silent))
        ends = np.concatenate((finish[ended], np.full(len(silent), Finish.LENGTH, np.int8)))
        return Ended(slots, ends, self.publish())  # before a carrier that ended takes its pages along

    def retire(self, ended: Ended) -> None:
        """Free the slots and pages of ended sequences."""
        if not len(ended.slots):
            return
        failed = ended.finish == Finish.ERROR
        sequence = self.active_set.sequence
        names = sequence[ended.slots].tolist()
        self._moved(State.DONE, sequence[ended.slots[~failed]].tolist())
        self._moved(State.FAILED, sequence[ended.slots[failed]].tolist())
        self._silent.difference_update(names)
        self._leave(ended.slots)
        for name in names:
            self.prefixes.leave(name)

    def check(self) -> None:
        """Raise InternalError unless every law of this rank's sequences holds (laws 3 and 4)."""
        active = self.active_set
        active.check()
        self.prefixes.check()
        for slot in active.slots.tolist():
            borrowed = self.kv.table[slot, : self.kv.borrowed[slot]]
            if not np.array_equal(borrowed, self.prefixes.borrowed_by(int(active.sequence[slot]))):
                raise InternalError(f"slot {slot} borrows other pages than those of the prefix that it goes on behind")
        self.places.check(active.slots, active.known[active.slots])
        waiting = np.array([entry.sequence for entry in self.backlog], np.int64)
        everyone = np.concatenate((active.sequence[active.slots], waiting))
        if len(np.unique(everyone)) != len(everyone):
            raise InternalError("a sequence is active or waiting twice on this rank")

    # --- inside ---------------------------------------------------------------------------------------------------

    def _pressed(self) -> int:
        """Return how many pages lack at home for all of the backlog that could start, were their full pages on disk."""
        waiting = self._could_start()
        spare = self.kv.growing(self.active)
        return max(0, waiting * (1 + RESERVE) + spare - self.kv.free) if waiting else 0

    def _could_start(self) -> int:
        """Return how many of the backlog have a slot to start in."""
        return min(len(self.backlog), self.active_set.free)

    def _strip(self) -> bool:
        """Throw KV away that nobody computes with now: a prefix that only later ones need, else that of the youngest
        that waits, else a tail; False when there is none."""
        if self.prefixes.strip(tails=False):
            return True
        entry = self.backlog.strip_newest()
        if entry is None:
            return self.prefixes.strip(tails=True)
        self._give_up(entry)
        return True

    def _start(self, entry: Entry) -> Start | None:
        """Say how an entry begins; None while another computes what it shares."""
        if entry.with_kv:
            link = self.prefixes.link_of(entry.sequence)
            return Start(self.prefixes.borrowed_by(entry.sequence), entry.with_kv, NO_ONE, link)
        return self.prefixes.begin(entry.sequence, entry.tokens)

    def _pages_ahead(self, entry: Entry) -> int:
        """Return the pages that an entry will need once what it shares is there."""
        shared = entry.prefixes[-1].depth // self.kv.page_tokens
        return max(0, self.kv.pages_for(len(entry.tokens)) - shared) + RESERVE

    def _begin(self, slot: int, entry: Entry, start: Start) -> None:
        """Note how an entry, as it was before, became active."""
        if not entry.with_kv and start.link != NO_ONE:
            self.prefixes.link(entry.sequence, start.link)
            self.tokens.reuse(entry.sequence, start.with_kv)
            if start.tail != NO_ONE:
                self._copies.append((start.tail, int(self.kv.table[slot, len(start.borrowed)])))
        self.prefixes.begun(entry.sequence, slot, entry.tokens)

    def _give_up(self, entry: Entry) -> None:
        """Give back the pages of an entry that will compute its KV again."""
        self.tokens.lose(entry.sequence, entry.with_kv)
        self.prefixes.unlink(entry.sequence)
        self.places.release(entry)

    def _lift(self, slot: int, keep: bool) -> tuple[int, Entry]:
        """Take a sequence out of its slot -> its order and entry; keep: with the pages of its KV."""
        active = self.active_set
        sequence, with_kv = int(active.sequence[slot]), int(active.with_kv[slot])
        tokens = active.tokens[slot, : active.known[slot]].copy()
        home, disk = NO_PAGES, NO_PAGES
        if keep:
            home, disk = self.places.park(slot, with_kv)
            self.prefixes.put_down(sequence)
        else:
            self.prefixes.unlink(sequence)
            self.tokens.lose(sequence, with_kv)
            self._moved(State.YIELDED, [sequence])
        order = int(active.order[slot])
        entry = Entry(
            sequence, tokens, int(active.prompt[slot]), int(active.most[slot]), with_kv if keep else 0, home, disk,
            started=True, level=level_of(order), prefixes=self.prefixes.path(sequence),
        )  # fmt: skip
        self._leave(np.array([slot], np.int64))
        return order, entry

    def _next_key(self, entry: Entry) -> int:
        key = age_key(entry.level, self._admitted)
        self._admitted += 1
        return key

    def _leave(self, slots: NDArray[np.int64]) -> None:
        self.places.close(slots)
        self.active_set.remove(slots)

    def _moved(self, state: State, sequences: list[int]) -> None:
        if self._silent:
            sequences = [one for one in sequences if one not in self._silent]
        if not sequences:
            return
        if self._moves and self._moves[-1][0] is state:
            self._moves[-1][1].extend(sequences)
        else:
            self._moves.append((state, list(sequences)))
