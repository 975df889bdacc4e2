"""The executor of one rank: it carries decisions out and owns all device state (weights, KV pages, hidden rows).

One step is option B of the paper (A4).  In every layer the attention runs in micro-batches of at most `b_attn` tokens;
each one YIELDs at the boundary to the experts: its hidden rows stay where they are, in the step's buffer, and its
coroutines' position becomes "experts of this layer".  When `b_moe` tokens have gathered they COMBINE: the experts run
once for all of them, and the coroutines go on to the next layer.  Micro-batches fill the buffer in order, so a combined
batch is a slice of it and neither primitive copies a byte.

With yield points off a forward pass is atomic: every micro-batch runs through all layers by itself (for comparison).

How many expert batches a layer has is agreed by all ranks before the step starts (`agreed`), because every rank must
enter every exchange (law 1).  The executor decides nothing; it refuses to know rank 0, requests and text.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from bgmpi.coroutine import Module
from bgmpi.kernels.backend import AttentionPlan, Backend
from bgmpi.model import Model
from bgmpi.sequence_manager import StepPlan

NOWHERE = -1
_LOGIT_ROWS = 256


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Tokens [start, stop) of a step and the slots they belong to."""

    start: int
    stop: int
    slots: NDArray[np.int64]
    positions: torch.Tensor
    plan: AttentionPlan


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

    pages: KV pages in the pool; page_tokens: tokens in a page; budget: most tokens of a step; slots: most sequences.
    """

    def __init__(
        self,
        model: Model,
        backend: Backend,
        dtype: torch.dtype,
        *,
        shape: Shape,
        pages: int,
        page_tokens: int,
        budget: int,
        slots: int,
    ) -> None:
        self.model = model
        self.shape = shape
        self.lockstep = any(model.is_collective(layer) for layer in range(model.layers))
        self._backend = backend
        self._page_tokens = page_tokens
        one = model.page_shape(page_tokens)
        self._kv = [backend.empty((pages, *one), dtype) for _ in range(model.layers)]
        self._hidden = backend.empty((budget, model.arch.hidden), dtype)
        self.at_layer: NDArray[np.int32] = np.full(slots, NOWHERE, np.int32)
        self.at_module: NDArray[np.int8] = np.zeros(slots, np.int8)
        self.expert_batches = 0
        self.expert_tokens = 0

    def step(self, plan: StepPlan | None, table: NDArray[np.int32], most_tokens: int) -> torch.Tensor:
        """Collective over the world when the model has experts.  Compute one step.

        plan: this rank's part, None for no token; table: page table int32 [slots, widest]; most_tokens: tokens of
        the rank that has most, so that all ranks make the same sweeps.  -> the final hidden rows [T, D], a view that
        the next step overwrites.
        """
        batches = self._cut(plan, table) if plan is not None else []
        tokens = len(plan.ids) if plan is not None else 0
        hidden = self._hidden[:tokens]
        if plan is not None:
            hidden.copy_(self.model.embed(torch.from_numpy(plan.ids)))
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
        self.model.feed_forward(layer, hidden[start:stop])
        if self.model.is_collective(layer):
            self.expert_batches += 1
            self.expert_tokens += stop - start

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Return float32 [n, vocab] of final hidden rows [n, D].  Local."""
        if len(rows) <= _LOGIT_ROWS:
            return self.model.logits(rows)
        return torch.cat([self.model.logits(part) for part in rows.split(_LOGIT_ROWS)])

    # --- inside ---------------------------------------------------------------------------------------------------

    def _sweep(self, hidden: torch.Tensor, batches: list[MicroBatch], agreed: int) -> None:
        first = batches[0].start if batches else 0
        threshold = self.shape.b_moe if self.shape.yield_points else 0
        for layer in range(self.model.layers):
            combined, gathered, runs = first, first, 0
            for batch in batches:
                rows = hidden[batch.start : batch.stop]
                self.model.attend(layer, rows, batch.positions, batch.plan, self._kv[layer])
                self.do_yield(batch, layer)
                gathered = batch.stop
                while threshold and gathered - combined >= threshold:
                    self.do_combine(hidden, layer, combined, combined + threshold)
                    combined, runs = combined + threshold, runs + 1
            if gathered > combined:
                self.do_combine(hidden, layer, combined, gathered)
                runs += 1
            if self.model.is_collective(layer):
                for _ in range(agreed - runs):
                    self.do_combine(hidden, layer, gathered, gathered)

    def _cut(self, plan: StepPlan, table: NDArray[np.int32]) -> list[MicroBatch]:
        """Cut a step's tokens into micro-batches; a long chunk may span several, each seeing the KV of those before."""
        size = self.shape.b_attn
        positions = torch.from_numpy(plan.positions)
        cuts = []
        for start in range(0, len(plan.ids), size):
            stop = min(start + size, len(plan.ids))
            low = int(np.searchsorted(plan.first, start, side="right")) - 1
            high = int(np.searchsorted(plan.first, stop, side="left"))
            first = np.clip(plan.first[low : high + 1], start, stop)
            before = plan.before[low:high] + (first[:-1] - plan.first[low:high])
            slots = plan.slots[low:high]
            ready = self._backend.plan_attention(first - start, before, table[slots], self._page_tokens)
            cuts.append(MicroBatch(start, stop, slots, positions[start:stop], ready))
        return cuts
