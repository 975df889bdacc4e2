"""One rank's half of a round: carry out what rank 0 said, make room, refill, step, answer, report.

It joins the pure sequence manager to the executor's tensors, the sampler and the transcripts, and hands finished
answers to a sink.  It knows neither rank 0's reasons nor files.

Page boundary (paper A5): pending appends are waited for, the finished are retired already, who must make room yields,
then the backlog refills and KV comes back (COMBINE).  MIGRATE and PARTITION have rooms of their own.

Where the model has experts all ranks walk in lockstep: before each step they agree, in one small collective, how many
tokens the fullest rank has and whether one starves, so every rank makes the same exchanges and ends the round at the
same step (law 1).  Dense models agree on nothing and meet again at the round's end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from bgmpi.backlog import Entry
from bgmpi.eviction import Way
from bgmpi.executor import Executor, Head
from bgmpi.group import Group
from bgmpi.io.host_store import HostStore
from bgmpi.io.tokenizer import Tokenizer
from bgmpi.migration import migrate
from bgmpi.partition import Sharded, shard, unshard
from bgmpi.primitives import FEW_ACTIVE, NOBODY, Deed, Ids, Migrate, Partition, Reported, Run
from bgmpi.pulse import Phase
from bgmpi.request import Answer, Begun, Finish, Request
from bgmpi.sampling import Drawn, Sampler
from bgmpi.saved_kv import restore
from bgmpi.sequence_manager import Ended, SequenceManager
from bgmpi.shard import Shard
from bgmpi.shared_prefixes import Prefix
from bgmpi.step_plan import StepPlan
from bgmpi.tally import Moves
from bgmpi.transcript import Transcript, close_transcript, go_on, open_transcript, so_far
from bgmpi.world import World

Flags = NDArray[np.bool_]
#: Rows whose logits are there at once.
_LOGIT_ROWS = 256
#: A step with so many tokens a sequence is one of prefill.
_PREFILL_SHARE = 8


@dataclass(frozen=True, slots=True)
class Work:
    """Sequences of one request that a rank is given.

    sequences[i] is sample samples[i] of the request; most: the longest each may become, tokens; begun: what an earlier
    attempt left of some; level: how urgent they are (`fairness.Turns`); prefixes: what their prompt shares with others,
    shallow before deep.
    """

    request: Request
    sequences: list[int]
    samples: list[int]
    most: int
    queued_s: float
    begun: dict[int, Begun] = field(default_factory=dict)
    level: int = 0
    prefixes: tuple[Prefix, ...] = ()


@dataclass(slots=True)
class Tally:
    """What a rank counted since its last report."""

    steps: int = 0
    seconds: float = 0.0
    thin: int = 0
    full: int = 0


@dataclass(slots=True)
class Rank:
    """The rank's live sequences and how they advance.

    groups: this rank's groups by (first rank, size); clock: seconds since the job began; sink: takes each finished
    answer; check: prove all laws after every step; notes: keep deeds for the trace.
    """

    world: World
    groups: dict[tuple[int, int], Group]
    store: HostStore
    manager: SequenceManager
    executor: Executor
    sampler: Sampler
    tokenizer: Tokenizer
    clock: Callable[[], float]
    sink: Callable[[Answer], None]
    check: bool = False
    notes: bool = False
    live: dict[int, Transcript] = field(default_factory=dict)
    moves: Moves = field(default_factory=Moves)
    _sharded: Sharded | None = None
    _shards: dict[tuple[int, int, int], Shard] = field(default_factory=dict)
    _deeds: list[Deed] = field(default_factory=list)
    _tally: Tally = field(default_factory=Tally)
    _listening: set[int] = field(default_factory=set)
    _scoring: set[int] = field(default_factory=set)
    _answered: list[NDArray[np.int64]] = field(default_factory=list)
    _prefilled: int = 0
    _prefill_seconds: float = 0.0

    def admit(self, work: list[Work]) -> None:
        """Take sequences into the backlog.  Local."""
        entries = []
        for item in work:
            request, queued = item.request, item.queued_s
            for sequence, sample in zip(item.sequences, item.samples, strict=True):
                tokens, begun = request.prompt, item.begun.get(sequence)
                if begun is None:
                    self.live[sequence] = open_transcript(request, sample, queued, self.tokenizer)
                else:
                    self.live[sequence] = go_on(request, sample, queued, begun, self.tokenizer)
                    tokens = np.concatenate((tokens, begun.tokens))
                entry = Entry(sequence, tokens, len(request.prompt), item.most, level=item.level,
                              prefixes=item.prefixes)
                self.manager.prefixes.enter(sequence, item.prefixes, told=True)
                # Log-probabilities of a prompt come only while it is computed.
                if begun is not None and begun.kv is not None and self.live[sequence].prompt_logprobs is None:
                    entry = restore(entry, begun.kv, manager=self.manager, store=self.store)
                entries.append(entry)
        self.manager.admit(entries)

    def close(self, prefixes: list[int]) -> None:
        """Note that the job has no further sequence that shares these.  Local."""
        self.manager.prefixes.close(prefixes)

    def suspend(self, sequences: Ids) -> None:
        """YIELD active sequences and hold them, their KV at home.  Local."""
        begun, manager = self.clock(), self.manager
        slots = manager.active_set.slots_of(sequences)
        moved = self._bring_home(slots)
        for slot in manager.suspend(sequences).tolist():
            self._vacate(slot)
        self._note("yield", begun, sequences, moved)

    def resume(self, sequences: Ids) -> None:
        """COMBINE: let held sequences run again, as room allows.  Local."""
        self.manager.backlog.combine(sequences)

    def migrate(self, orders: list[Migrate]) -> None:
        """Collective over the world: carry out the round's migrations."""
        begun = self.clock()
        # A page that an ended sequence left may still be written to: not once it has another owner.
        self.executor.kv.settle()
        done = migrate(orders, world=self.world, store=self.store, manager=self.manager, live=self.live,
                       tokenizer=self.tokenizer)
        self.moves.migrated += len(done.arrived)
        self.moves.moved_bytes += done.bytes
        sent = [order.sequences for order in orders if order.source == self.world.rank]
        if len(done.arrived) or sent:
            self._note("migrate", begun, np.concatenate((done.arrived, *sent)), done.bytes)

    def partition(self, orders: list[Partition]) -> None:
        """Collective over the world: end and begin groups, each order collective over its group."""
        self.executor.kv.settle()
        for order in orders:
            if order.size == 1:
                if self._sharded is not None and self._sharded.sequence == order.sequence:
                    self._unshard(self._sharded)
            elif order.first <= self.world.rank < order.first + order.size:
                self._shard(order)

    def run(self, order: Run) -> None:
        """Collective over the world when the model has experts.  Make up to `order.steps` steps."""
        self.world.pulse.enter(Phase.STEP)
        self._make_room()
        self._refill()
        self._recall()
        begun = self.clock()
        for _ in range(order.steps):
            plan = self.manager.plan()
            most, last = self._agree(len(plan.ids) if plan is not None else 0, order.more)
            if not most:
                break
            began = self.clock()
            self._step(plan, most)
            self.world.pulse.stepped()
            self._tally.steps += 1
            self._count_thin(plan, order.more)
            if plan is not None and len(plan.ids) >= _PREFILL_SHARE * len(plan.slots):
                self._prefilled += len(plan.ids)
                self._prefill_seconds += self.clock() - began
            if self.check:
                self.manager.check()
            if last:
                break
        self._tally.seconds += self.clock() - begun
        self._note("run", begun, NOBODY, self.executor.kv.take_streamed())

    def at_home(self) -> NDArray[np.int64]:
        """Bring home all KV of the active sequences that only this rank computes; -> their slots, int64 [k].  Local."""
        slots = self.manager.active if self._sharded is None else self.manager.active[:0]
        self._bring_home(slots)
        return slots

    @property
    def prefill_rate(self) -> float:
        """Tokens a second in steps of prefill so far, NaN before there was any."""
        return self._prefilled / self._prefill_seconds if self._prefill_seconds else float("nan")

    def unfinished(self) -> list[Answer]:
        """Return what the live sequences have generated so far, those that have nothing left out.  Local.

        Of a group only the leader tells.
        """
        active = self.manager.active_set
        leads = self._sharded is None or self._sharded.leads
        have = [(int(active.sequence[slot]), active.generated(slot)) for slot in active.slots.tolist() if leads]
        have += [(entry.sequence, entry.tokens[entry.prompt :]) for entry in self.manager.backlog]
        return [so_far(self.live[sequence], tokens) for sequence, tokens in have if len(tokens)]

    def report(self) -> Reported:
        """Return what happened since the last report.  Local."""
        manager, tally, deeds = self.manager, self._tally, tuple(self._deeds)
        self._tally, tokens = Tally(), manager.tokens.take()
        answered = np.concatenate(self._answered) if self._answered else NOBODY
        self._answered.clear()
        self._deeds.clear()
        active = manager.active if self._sharded is None or self._sharded.leads else manager.active[:0]
        few = active if len(active) <= FEW_ACTIVE else active[:0]
        return Reported(
            rank=self.world.rank,
            moves=manager.take_moves(),
            free_pages=manager.kv.free,
            pool_pages=manager.kv.pages,
            slots_free=manager.active_set.free,
            backlog=len(manager.backlog),
            steps=tally.steps,
            prompt_tokens=tokens.prompt,
            generated_tokens=tokens.generated,
            wasted_tokens=tokens.wasted,
            reused_tokens=tokens.reused,
            thin_steps=tally.thin,
            full_steps=tally.full,
            seconds=tally.seconds,
            active=manager.active_set.sequence[few],
            decoded=manager.active_set.decoded(few),
            deeds=deeds,
            answered=answered,
            stop=self.world.stop.reason,
        )

    # --- inside ---------------------------------------------------------------------------------------------------

    def _note(self, what: str, begun: float, sequences: Ids, moved: int) -> None:
        if self.notes:
            self._deeds.append(Deed(what, begun, self.clock() - begun, sequences, moved))

    def _make_room(self) -> None:
        """YIELD whoever must, until each active sequence can make one page of steps."""
        manager, kv = self.manager, self.executor.kv
        kv.settle()
        while (eviction := manager.evict()) is not None:
            begun, slots, moved = self.clock(), eviction.slots, 0
            names = manager.active_set.sequence[slots].copy()
            match eviction.way:
                case Way.DEMOTE:
                    moved = kv.demote(manager.places, slots, manager.active_set.with_kv[slots])
                case Way.SPILL:
                    moved = kv.spill(manager.places, slots)
                case Way.GIVE_UP:
                    pass
            for slot in manager.evicted(eviction):
                self._vacate(slot)
            self._note("spill" if eviction.way is Way.SPILL else "yield", begun, names, moved)

    def _recall(self) -> None:
        """Let KV come home from the disk where there is room for all of it."""
        begun, manager, kv = self.clock(), self.manager, self.executor.kv
        slots = manager.recall()
        if len(slots):
            kv.settle()
            moved = kv.recall(manager.places, slots, manager.active_set.with_kv[slots])
            manager.recalled(slots)
            self._note("combine", begun, manager.active_set.sequence[slots], moved)

    def _bring_home(self, slots: NDArray[np.int64]) -> int:
        """Let all KV of these slots be at home -> bytes copied."""
        manager, kv = self.manager, self.executor.kv
        kv.settle()
        if manager.places.device is None:
            return 0
        resident = slots[manager.places.resident[slots]]
        moved = kv.demote(manager.places, resident, manager.active_set.with_kv[resident])
        manager.places.end_demotion(resident)
        return moved

    def _shard(self, order: Partition) -> None:
        """Collective over the group."""
        begun, group = self.clock(), self.groups[order.first, order.size]
        ready = self._shards.get((order.first, order.size, order.leader))
        if ready is None:
            ready = Shard(self.executor.model, group, order.leader - order.first)
            self._shards[order.first, order.size, order.leader] = ready
        manager = self.manager
        willing = True
        if order.leader == self.world.rank:
            slots = manager.active_set.slots_of(np.array([order.sequence], np.int64))
            self._bring_home(slots)
            willing = not self._scores(int(slots[0]))
        self._sharded = shard(order, group, ready.own_heads, self.store, manager, willing=willing)
        if self._sharded is not None:
            manager.sharded(order.sequence)
            self.executor.shard = ready
            self.moves.partitioned += self._sharded.leads
        elif order.leader == self.world.rank:
            manager.refused(order.sequence)
        self._note("partition", begun, np.array([order.sequence], np.int64), 0)

    def _unshard(self, sharded: Sharded) -> None:
        """Collective over the group."""
        begun, manager = self.clock(), self.manager
        self._bring_home(manager.active)
        moved = unshard(sharded, self.store, manager)
        if sharded.leads:
            manager.resumed(sharded.sequence)
        else:
            manager.forget(sharded.sequence)
        self._sharded = self.executor.shard = None
        self._note("partition", begun, np.array([sharded.sequence], np.int64), moved)

    def _count_thin(self, plan: StepPlan | None, more: bool) -> None:
        manager = self.manager
        tokens = 0 if plan is None else len(plan.ids)
        if tokens < manager.budget // 2 and (more or manager.backlog):
            self._tally.thin += 1
            self._tally.full += manager.full

    def _agree(self, tokens: int, more: bool) -> tuple[int, bool]:
        """Return the fullest rank's tokens, and whether the round should end after this step: a rank starves while rank
        0 has sequences that wait, or is asked to stop."""
        manager = self.manager
        room = manager.active_set.free > len(manager.active) // 8 and manager.kv.free > manager.kv.pages // 8
        # A group steps together: one member alone must not leave the round.
        starves = more and room and manager.runs_dry(tokens)
        last = starves or (bool(self.world.stop.reason) and self._sharded is None)
        if self.world.size == 1 or not self.executor.lockstep:
            return tokens, last
        everyone = self.world.all_gather_counts(np.array([tokens, last], np.int64))
        return int(everyone[:, 0].max()), bool(everyone[:, 1].any())

    def _step(self, plan: StepPlan | None, most: int) -> None:
        manager = self.manager
        hidden = self.executor.step(plan, most)
        with self.executor.head() as logits:
            if plan is None:
                return
            if self._scoring:
                self._record_prompt(plan, hidden, logits)
            slots = plan.slots[plan.emits]
            tokens = np.empty(0, np.int32)
            stopped = fault = by_token = np.empty(0, bool)
            if len(slots):
                rows = hidden[torch.from_numpy(plan.first[1:][plan.emits].astype(np.int64) - 1)]
                tokens, stopped, fault, by_token = self._draw(logits, rows, slots)
        ended = manager.commit(plan, tokens, stopped, fault)
        if len(ended.slots):
            if self._sharded is None or self._sharded.leads:
                self._answer(ended, set(slots[by_token].tolist()))
            else:
                manager.retire(ended)
            self._sharded = self.executor.shard = None
        if ended.published or len(ended.slots):
            self._refill()

    def _draw(
        self, logits: Head, rows: torch.Tensor, slots: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], Flags, Flags, Flags]:
        """Collective over the group when sharded.  Draw the next token of each slot from its final hidden row, note and
        listen; in slices, so that no block of all rows x vocabulary arises.

        -> tokens int32 [E]; stopped, fault, by_token bool [E]; the leader's, for who follows.
        """
        sharded, outcome = self._sharded, np.empty((4, len(slots)), np.int32)
        leads = sharded is None or sharded.leads
        for start in range(0, len(slots), _LOGIT_ROWS):
            part = slice(start, start + _LOGIT_ROWS)
            values = logits(rows[part])
            if leads:
                outcome[:, part] = self._draw_slice(values, slots[part])
        if sharded is not None:
            sharded.group.broadcast_bytes(outcome.reshape(-1).view(np.uint8), sharded.leader)
        return outcome[0], outcome[1].astype(bool), outcome[2].astype(bool), outcome[3].astype(bool)

    def _draw_slice(self, logits: torch.Tensor, slots: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return token, stopped, fault, stopped by its token of each slot, int32 [4, n]."""
        generated = self.manager.active_set.decoded(slots)
        drawn = self.sampler.draw(logits, slots, generated)
        self._record(slots, drawn)
        self._greet(slots)
        heard = drawn.stopped | self._listen(slots, drawn)
        return np.stack((drawn.tokens, heard, drawn.fault, drawn.stopped)).astype(np.int32)

    def _refill(self) -> None:
        begun, manager = self.clock(), self.manager
        for slot, entry in manager.refill():
            transcript = self.live[entry.sequence]
            generated = entry.tokens[entry.prompt :]
            asks = transcript.request.sampling
            self.sampler.place(slot, asks, transcript.sample, transcript.request.prompt, generated)
            if transcript.stream is not None:
                self._listening.add(slot)
            if transcript.prompt_logprobs is not None:
                self._scoring.add(slot)
        self.executor.kv.copy_home(manager.take_copies())
        ready = manager.promote()
        if len(ready):
            self.executor.kv.settle()
            moved = self.executor.kv.promote(manager.places, ready, manager.active_set.with_kv[ready])
            manager.promoted(ready)
            self._note("combine", begun, manager.active_set.sequence[ready], moved)

    def _vacate(self, slot: int) -> None:
        self.sampler.clear(slot)
        self._listening.discard(slot)
        self._scoring.discard(slot)

    def _listen(self, slots: NDArray[np.int64], drawn: Drawn) -> NDArray[np.bool_]:
        """Feed the rows that have stop texts and note what stopped a row; -> bool [B], those whose stop text came."""
        for index in np.flatnonzero(drawn.stop_token >= 0).tolist():
            self.live[int(self.manager.active_set.sequence[slots[index]])].stop_reason = int(drawn.stop_token[index])
        heard = np.zeros(len(slots), bool)
        if not self._listening:
            return heard
        for index, slot in enumerate(slots.tolist()):
            if slot not in self._listening or drawn.fault[index]:
                continue
            transcript = self.live[int(self.manager.active_set.sequence[slot])]
            assert transcript.stream is not None
            if drawn.stopped[index] and not transcript.request.sampling.include_stop:
                continue
            reason = transcript.stream.push(int(drawn.tokens[index]))
            if reason is not None:
                transcript.stop_reason = reason
                heard[index] = True
        return heard

    def _greet(self, slots: NDArray[np.int64]) -> None:
        """Note the moment of each sequence's first token."""
        first = slots[self.manager.active_set.decoded(slots) == 0]
        if len(first):
            now = self.clock()
            for sequence in self.manager.active_set.sequence[first].tolist():
                self.live[sequence].first_token_s = now

    def _record(self, slots: NDArray[np.int64], drawn: Drawn) -> None:
        if drawn.chosen is None or drawn.top_ids is None or drawn.top is None:
            return
        for index, sequence in enumerate(self.manager.active_set.sequence[slots].tolist()):
            pieces = self.live[sequence].logprobs
            if pieces is not None and not drawn.fault[index]:
                one = slice(index, index + 1)
                pieces.add(drawn.chosen[one], drawn.top_ids[one], drawn.top[one])

    def _record_prompt(self, plan: StepPlan, hidden: torch.Tensor, logits: Head) -> None:
        """Record log-probabilities of prompt tokens, in slices so that no tokens x vocabulary block arises (C59)."""
        manager = self.manager
        for index, slot in enumerate(plan.slots.tolist()):
            if slot not in self._scoring:
                continue
            pieces = self.live[int(manager.active_set.sequence[slot])].prompt_logprobs
            assert pieces is not None
            before, prompt = int(plan.before[index]), int(manager.active_set.prompt[slot])
            low = max(before, pieces.count - 1)
            high = min(before + int(plan.first[index + 1] - plan.first[index]), prompt - 1)
            for start in range(low, high, 64):
                stop = min(start + 64, high)
                rows = hidden[int(plan.first[index]) + start - before : int(plan.first[index]) + stop - before]
                targets = manager.active_set.tokens[slot, start + 1 : stop + 1]
                pieces.add(*self.sampler.prompt_logprobs(logits(rows), targets, pieces.width))

    def _scores(self, slot: int) -> bool:
        """Say whether log-probabilities of prompt tokens are still to come: the leader alone would ask the group's head
        for them."""
        pieces = self.live[int(self.manager.active_set.sequence[slot])].prompt_logprobs
        return pieces is not None and pieces.count < int(self.manager.active_set.prompt[slot])

    def _answer(self, ended: Ended, by_token: set[int]) -> None:
        manager, now = self.manager, self.clock()
        active, good = manager.active_set, ended.slots[ended.finish != Finish.ERROR]
        caps = active.most[good] - active.prompt[good]
        self._answered.append(np.stack((caps, active.decoded(good)), axis=1))
        for slot, finish in zip(ended.slots.tolist(), ended.finish.tolist(), strict=True):
            tokens = manager.active_set.generated(slot)
            transcript = self.live.pop(int(manager.active_set.sequence[slot]))
            self.sink(
                close_transcript(
                    transcript, tokens, Finish(finish), slot in by_token, now, self.tokenizer
                )
            )
            self._vacate(slot)
        manager.retire(ended)
