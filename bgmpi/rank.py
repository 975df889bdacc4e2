"""One rank's half of a round: admit, make room, refill, step, answer, report.

It joins the pure sequence manager to the executor's tensors, the sampler and the transcripts, and hands finished
answers to a sink.  It knows neither rank 0's reasons nor files.

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

from bgmpi.executor import Executor
from bgmpi.io.tokenizer import Tokenizer
from bgmpi.primitives import Reported, Run
from bgmpi.request import Answer, Finish, Request
from bgmpi.sampling import Drawn, Sampler
from bgmpi.sequence_manager import Ended, Entry, SequenceManager, StepPlan
from bgmpi.transcript import Transcript, close_transcript, open_transcript
from bgmpi.world import World


@dataclass(frozen=True, slots=True)
class Work:
    """Sequences of one request that a rank is given.

    sequences[i] is sample samples[i] of the request; most: the longest each may become, tokens.
    """

    request: Request
    sequences: list[int]
    samples: list[int]
    most: int
    queued_s: float


@dataclass(slots=True)
class Tally:
    """What a rank counted since its last report."""

    steps: int = 0
    seconds: float = 0.0
    prompt: int = 0
    generated: int = 0
    wasted: int = 0


@dataclass(slots=True)
class Rank:
    """The rank's live sequences and how they advance.

    clock: seconds since the job began; sink: takes each finished answer; check: prove all laws after every step.
    """

    world: World
    manager: SequenceManager
    executor: Executor
    sampler: Sampler
    tokenizer: Tokenizer
    clock: Callable[[], float]
    sink: Callable[[Answer], None]
    check: bool = False
    live: dict[int, Transcript] = field(default_factory=dict)
    _tally: Tally = field(default_factory=Tally)
    _listening: set[int] = field(default_factory=set)
    _scoring: set[int] = field(default_factory=set)

    def admit(self, work: list[Work]) -> None:
        """Take sequences into the backlog.  Local."""
        entries = []
        for item in work:
            for sequence, sample in zip(item.sequences, item.samples, strict=True):
                self.live[sequence] = open_transcript(item.request, sample, item.queued_s, self.tokenizer)
                entries.append(Entry(sequence, item.request.prompt, len(item.request.prompt), item.most))
        self.manager.admit(entries)

    def run(self, order: Run) -> None:
        """Collective over the world when the model has experts.  Make up to `order.steps` steps."""
        for slot, _ in self.manager.make_room():
            self._vacate(slot)
        self._refill()
        begun = self.clock()
        for _ in range(order.steps):
            plan = self.manager.plan()
            most, starving = self._agree(len(plan.ids) if plan is not None else 0, order.more)
            if not most:
                break
            self._step(plan, most)
            self._tally.steps += 1
            if self.check:
                self.manager.check()
            if starving:
                break
        self._tally.seconds += self.clock() - begun

    def report(self) -> Reported:
        """Return what happened since the last report.  Local."""
        manager, tally = self.manager, self._tally
        self._tally = Tally(0, 0.0, manager.prompt_tokens, manager.generated_tokens, manager.wasted_tokens)
        return Reported(
            rank=self.world.rank,
            moves=manager.take_moves(),
            free_pages=manager.kv.free,
            pool_pages=manager.kv.pages,
            slots_free=manager.slots_free,
            backlog=manager.backlog,
            steps=tally.steps,
            prompt_tokens=manager.prompt_tokens - tally.prompt,
            generated_tokens=manager.generated_tokens - tally.generated,
            wasted_tokens=manager.wasted_tokens - tally.wasted,
            seconds=tally.seconds,
        )

    # --- inside ---------------------------------------------------------------------------------------------------

    def _agree(self, tokens: int, more: bool) -> tuple[int, bool]:
        """Return the fullest rank's tokens, and whether a rank starves while rank 0 has sequences that wait."""
        manager = self.manager
        room = manager.slots_free > len(manager.active) // 8 and manager.kv.free > manager.kv.pages // 8
        starving = more and not manager.backlog and room
        if self.world.size == 1 or not self.executor.lockstep:
            return tokens, starving
        everyone = self.world.all_gather_counts(np.array([tokens, starving], np.int64))
        return int(everyone[:, 0].max()), bool(everyone[:, 1].any())

    def _step(self, plan: StepPlan | None, most: int) -> None:
        manager = self.manager
        hidden = self.executor.step(plan, manager.kv.table, most)
        if plan is None:
            return
        if self._scoring:
            self._record_prompt(plan, hidden)
        slots = plan.slots[plan.emits]
        tokens = np.empty(0, np.int32)
        stopped = fault = by_token = np.empty(0, bool)
        if len(slots):
            rows = hidden[torch.from_numpy(plan.first[1:][plan.emits].astype(np.int64) - 1)]
            drawn = self.sampler.draw(
                self.executor.logits(rows), slots, manager.known[slots] - manager.prompt[slots]
            )
            tokens, fault, by_token = drawn.tokens, drawn.fault, drawn.stopped
            stopped = by_token | self._listen(slots, drawn)
            self._record(slots, drawn)
            self._greet(slots)
        ended = manager.commit(plan, tokens, stopped, fault)
        if len(ended.slots):
            self._answer(ended, set(slots[by_token].tolist()))
            self._refill()

    def _refill(self) -> None:
        for slot, entry in self.manager.refill():
            transcript = self.live[entry.sequence]
            generated = entry.tokens[entry.prompt :]
            asks = transcript.request.sampling
            self.sampler.place(slot, asks, transcript.sample, transcript.request.prompt, generated)
            if transcript.stream is not None:
                self._listening.add(slot)
            if transcript.prompt_logprobs is not None:
                self._scoring.add(slot)

    def _vacate(self, slot: int) -> None:
        self.sampler.clear(slot)
        self._listening.discard(slot)
        self._scoring.discard(slot)

    def _listen(self, slots: NDArray[np.int64], drawn: Drawn) -> NDArray[np.bool_]:
        """Feed the rows that have stop texts and note what stopped a row; -> bool [B], those whose stop text came."""
        for index in np.flatnonzero(drawn.stop_token >= 0).tolist():
            self.live[int(self.manager.sequence[slots[index]])].stop_reason = int(drawn.stop_token[index])
        heard = np.zeros(len(slots), bool)
        if not self._listening:
            return heard
        for index, slot in enumerate(slots.tolist()):
            if slot not in self._listening or drawn.fault[index]:
                continue
            transcript = self.live[int(self.manager.sequence[slot])]
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
        first = slots[self.manager.known[slots] == self.manager.prompt[slots]]
        if len(first):
            now = self.clock()
            for sequence in self.manager.sequence[first].tolist():
                self.live[sequence].first_token_s = now

    def _record(self, slots: NDArray[np.int64], drawn: Drawn) -> None:
        if drawn.chosen is None or drawn.top_ids is None or drawn.top is None:
            return
        for index, sequence in enumerate(self.manager.sequence[slots].tolist()):
            pieces = self.live[sequence].logprobs
            if pieces is not None and not drawn.fault[index]:
                one = slice(index, index + 1)
                pieces.add(drawn.chosen[one], drawn.top_ids[one], drawn.top[one])

    def _record_prompt(self, plan: StepPlan, hidden: torch.Tensor) -> None:
        """Record log-probabilities of prompt tokens, in slices so that no tokens x vocabulary block arises (C59)."""
        manager = self.manager
        for index, slot in enumerate(plan.slots.tolist()):
            if slot not in self._scoring:
                continue
            pieces = self.live[int(manager.sequence[slot])].prompt_logprobs
            assert pieces is not None
            before, prompt = int(plan.before[index]), int(manager.prompt[slot])
            low = max(before, pieces.count - 1)
            high = min(before + int(plan.first[index + 1] - plan.first[index]), prompt - 1)
            for start in range(low, high, 64):
                stop = min(start + 64, high)
                rows = hidden[int(plan.first[index]) + start - before : int(plan.first[index]) + stop - before]
                targets = manager.tokens[slot, start + 1 : stop + 1]
                pieces.add(*self.sampler.prompt_logprobs(self.executor.logits(rows), targets, pieces.width))

    def _answer(self, ended: Ended, by_token: set[int]) -> None:
        manager, now = self.manager, self.clock()
        for slot, finish in zip(ended.slots.tolist(), ended.finish.tolist(), strict=True):
            tokens = manager.tokens[slot, manager.prompt[slot] : manager.known[slot]].copy()
            transcript = self.live.pop(int(manager.sequence[slot]))
            self.sink(
                close_transcript(
                    transcript, tokens, Finish(finish), slot in by_token, now, self.tokenizer
                )
            )
            self._vacate(slot)
        manager.retire(ended)
