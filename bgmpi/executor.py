"""The executor of one rank: it carries decisions out and owns all device state (weights, KV pages, hidden rows).

One step is option B of the paper (A4).  In every layer the attention runs in micro-batches of at most `b_attn` tokens;
each one YIELDs at the boundary to the experts: its hidden rows stay where they are, in the step's buffer, and its
coroutines' position becomes "experts of this layer".  When `b_moe` tokens have gathered they COMBINE: the experts run
once for all of them, and the coroutines go on to the next layer.  Micro-batches fill the buffer in order, so a combined
batch is a slice of it and neither primitive copies a byte.

Resident sequences compute where their KV lies.  Streamed ones stand behind them in the step, in micro-batches of their
own, whose pages come and go layer by layer (`KvStream`); a streamed sequence's tokens of a step are never cut, because
the second half would need pages that the first is still writing.

With yield points off a forward pass is atomic: every micro-batch runs through all layers by itself (for comparison).

How many expert batches a layer has is agreed by all ranks before the step starts (`agreed`), because every rank must
enter every exchange (law 1).  The executor decides nothing; it refuses to know rank 0, requests and text.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from bgmpi.coroutine import Module
from bgmpi.kernels.backend import AttentionPlan, Backend
from bgmpi.kv_places import KvPlaces
from bgmpi.kv_stream import KvStream, Passage, passage
from bgmpi.model import Attend, Model
from bgmpi.shard import Shard
from bgmpi.step_plan import StepPlan

NOWHERE = -1
Head = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Tokens [start, stop) of a step and the slots they belong to; `passage`: the pages of a streamed one."""

    start: int
    stop: int
    slots: NDArray[np.int64]
    positions: torch.Tensor
    plan: AttentionPlan
    passage: Passage | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """How a step is cut.  b_attn: tokens of an attention micro-batch; b_moe: tokens of an expert batch, 0 = all that
    gathered; yield_points False = atomic forward passes."""

    b_attn: int
    b_moe: int
    yield_points: bool = True

    def passes(self, tokens: int) -> int:
        """Return how many sweeps through the layers a step of `tokens` tokens makes."""
        return 1 if self.yield_points else -(-tokens // self.b_attn)

    def expert_batches(self, tokens: int) -> int:
        """Return how many expert batches a layer has in one sweep when the rank with most tokens has `tokens`."""
        if not tokens:
            return 0
        return -(-tokens // self.b_moe) if self.yield_points and self.b_moe else 1


class Executor:
    """Device state of one rank.

    kv: the pools of KV pages; hidden: rows [budget, D] for the step's hidden states; slots: most sequences.
    `shard` is the sharded model while this rank is one of a group that runs one sequence together, else None.
    """

    def __init__(
        self,
        model: Model,
        backend: Backend,
        kv: KvStream,
        places: KvPlaces,
        hidden: torch.Tensor,
        *,
        shape: Shape,
        slots: int,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = model
        self.kv = kv
        self.shape = shape
        self._beat = beat
        self.lockstep = any(model.is_collective(layer) for layer in range(model.layers))
        self.shard: Shard | None = None
        self._backend = backend
        self._places = places
        self._hidden = hidden
        self.at_layer: NDArray[np.int32] = np.full(slots, NOWHERE, np.int32)
        self.at_module: NDArray[np.int8] = np.zeros(slots, np.int8)
        self.expert_batches = 0
        self.expert_tokens = 0

    @property
    def _runs(self) -> Model:
        return self.model if self.shard is None else self.shard

    def step(self, plan: StepPlan | None, most_tokens: int) -> torch.Tensor:
        """Collective over the world when the model has experts, over the group when sharded.  Compute one step.

        plan: this rank's part, None for no token; most_tokens: tokens of the rank that has most, so that all ranks make
        the same sweeps.  -> the final hidden rows [T, D], a view that the next step overwrites.
        """
        self.kv.settle()
        batches = self._cut(plan) if plan is not None else []
        tokens = len(plan.ids) if plan is not None else 0
        hidden = self._hidden[:tokens]
        if plan is not None:
            hidden.copy_(self._runs.embed(torch.from_numpy(plan.ids)))
        for sweep in range(self.shape.passes(most_tokens)):
            mine = batches if self.shape.yield_points else batches[sweep : sweep + 1]
            self._sweep(hidden, mine, self.shape.expert_batches(most_tokens))
        return hidden

    def do_yield(self, batch: MicroBatch, layer: int) -> None:
        """Leave the micro-batch's coroutines standing before the experts of `layer`.  Local.

        Their hidden rows already lie in the step's buffer and their KV in its pages, so only the position is written.
        """
        self.at_layer[batch.slots] = layer
        self.at_module[batch.slots] = Module.EXPERTS

    def do_combine(self, hidden: torch.Tensor, layer: int, start: int, stop: int) -> None:
        """Collective over the world when the layer has experts, also with start == stop.  Resume the coroutines whose
        hidden rows are [start, stop) in one expert batch of `layer`."""
        self._runs.feed_forward(layer, hidden[start:stop])
        if self.model.is_collective(layer):
            self.expert_batches += 1
            self.expert_tokens += stop - start

    def head(self) -> AbstractContextManager[Head]:
        """Give what turns final hidden rows [n, D] into logits float32 [n, vocab].  Enter it once in every step, also
        with nothing to ask: weights that are read anew for each step are used in order.  Collective over the group
        when sharded, else local."""
        return self._runs.head()

    # --- inside ---------------------------------------------------------------------------------------------------

    def _sweep(self, hidden: torch.Tensor, batches: list[MicroBatch], agreed: int) -> None:
        first = batches[0].start if batches else 0
        threshold = self.shape.b_moe if self.shape.yield_points else 0
        self.kv.begin(batches)
        for layer in range(self.model.layers):
            combined, gathered, runs = first, first, 0
            self._beat()
            with self._runs.attention_of(layer) as attend:
                for batch in batches:
                    self._attend(attend, hidden, batch, layer)
                    self.do_yield(batch, layer)
                    gathered = batch.stop
                    while threshold and gathered - combined >= threshold:
                        self.do_combine(hidden, layer, combined, combined + threshold)
                        combined, runs = combined + threshold, runs + 1
            if gathered > combined or (self.model.streams and not self.model.is_collective(layer)):
                self.do_combine(hidden, layer, combined, gathered)
                runs += 1
            if self.model.is_collective(layer):
                for _ in range(agreed - runs):
                    self.do_combine(hidden, layer, gathered, gathered)

    def _attend(self, attend: Attend, hidden: torch.Tensor, batch: MicroBatch, layer: int) -> None:
        rows = hidden[batch.start : batch.stop]
        if batch.passage is None:
            attend(rows, batch.positions, batch.plan, self.kv.pages_of(layer))
            return
        attend(rows, batch.positions, batch.plan, self.kv.next_pages())
        self.kv.give_back()

    def _cut(self, plan: StepPlan) -> list[MicroBatch]:
        """Cut a step's tokens into micro-batches; a long chunk of a resident sequence may span several, each seeing the
        KV of those before."""
        size, first = self.shape.b_attn, plan.first.astype(np.int64)
        positions = torch.from_numpy(plan.positions)
        table = self._places.compute.table
        cuts = []
        streamed = int(first[plan.resident])
        for start in range(0, streamed, size):
            stop = min(start + size, streamed)
            low = int(np.searchsorted(first, start, side="right")) - 1
            high = int(np.searchsorted(first, stop, side="left"))
            ends = np.clip(first[low : high + 1], start, stop)
            before = plan.before[low:high] + (ends[:-1] - first[low:high])
            slots = plan.slots[low:high]
            ready = self._backend.plan_attention(
                (ends - start).astype(np.int32), before.astype(np.int32), table[slots], self._places.page_tokens
            )
            cuts.append(MicroBatch(start, stop, slots, positions[start:stop], ready))
        for low, high in self._streamed_cuts(plan):
            start, stop = int(first[low]), int(first[high])
            slots, before = plan.slots[low:high], plan.before[low:high]
            pages = passage(self._places, slots, before.astype(np.int64), np.diff(first[low : high + 1]))
            ready = self._backend.plan_attention(
                (first[low : high + 1] - start).astype(np.int32), before, pages.table, self._places.page_tokens
            )
            cuts.append(MicroBatch(start, stop, slots, positions[start:stop], ready, pages))
        return cuts

    def _streamed_cuts(self, plan: StepPlan) -> list[tuple[int, int]]:
        """Cut the streamed sequences [low, high) so that each piece has about `b_attn` tokens and its pages fit into a
        buffer."""
        cuts: list[tuple[int, int]] = []
        pages = -(-(plan.before + np.diff(plan.first)) // self._places.page_tokens)
        low, tokens, held = plan.resident, 0, 0
        for place in range(plan.resident, len(plan.slots)):
            count = int(plan.first[place + 1] - plan.first[place])
            if place > low and (tokens + count > self.shape.b_attn or held + pages[place] > self.kv.buffer_pages):
                cuts.append((low, place))
                low, tokens, held = place, 0, 0
            tokens, held = tokens + count, held + int(pages[place])
        if low < len(plan.slots):
            cuts.append((low, len(plan.slots)))
        return cuts
