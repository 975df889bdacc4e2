"""What rows ask to be changed in their logits before a token is chosen: penalties, biases, no early end.

All three touch few ids of a row, so an edit is a flat list of (row, id) pairs: gathered, changed, put back, without a
pass over the vocabulary and without a copy of the logits.  The order is fixed: repetition penalty, frequency and
presence penalties, bias, then the ends that come too early.

The repetition penalty is that of Hugging Face and vLLM (prompt and generated tokens; positive logits divided, others
multiplied); frequency and presence are OpenAI's (generated tokens only).  Ids that are never sampled are dropped when a
slot is placed.  Rejected: a vocabulary-wide count per slot, some hundred kilobytes each and a pass over all of it at
every step.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from bgmpi.request import Sampling
from bgmpi.slot_rows import SlotRows


class LogitEdits:
    """The edits of every slot.  `vocab`: ids below it can be sampled; `ends`: the ids that end any sequence."""

    def __init__(self, slots: int, vocab: int, ends: NDArray[np.int64]) -> None:
        self._vocab = vocab
        self._ends = ends
        self._seen = SlotRows(slots, {"id": (np.int64, -1), "generated": (np.int32, 0)})
        self._biases = SlotRows(slots, {"id": (np.int64, -1), "value": (np.float32, 0)})
        self._early = SlotRows(slots, {"id": (np.int64, -1)})
        self._min_tokens: NDArray[np.int64] = np.zeros(slots, np.int64)
        self._repetition: NDArray[np.float32] = np.ones(slots, np.float32)
        self._presence: NDArray[np.float32] = np.zeros(slots, np.float32)
        self._frequency: NDArray[np.float32] = np.zeros(slots, np.float32)

    def place(
        self, slot: int, sampling: Sampling, prompt: NDArray[np.int32], generated: NDArray[np.int32]
    ) -> bool:
        """Take what `sampling` asks for; prompt and generated int32 [tokens].  Say whether it asks for any edit."""
        penalised = wants_penalty(sampling)
        if penalised:
            self._repetition[slot] = sampling.repetition_penalty
            self._presence[slot] = sampling.presence_penalty
            self._frequency[slot] = sampling.frequency_penalty
            self._place_seen(slot, prompt, generated)
        biases = [(token, value) for token, value in sampling.logit_bias if 0 <= token < self._vocab]
        if biases:
            ids, values = zip(*biases, strict=True)
            self._biases.put(slot, id=np.array(ids, np.int64), value=np.array(values, np.float32))
        if sampling.min_tokens > 0:
            self._min_tokens[slot] = sampling.min_tokens
            ends = np.union1d(self._ends, np.array(sampling.stop_token_ids, np.int64))
            self._early.put(slot, id=ends[(ends >= 0) & (ends < self._vocab)])
        return penalised or bool(biases) or sampling.min_tokens > 0

    def _place_seen(self, slot: int, prompt: NDArray[np.int32], generated: NDArray[np.int32]) -> None:
        tokens = np.concatenate((prompt, generated)).astype(np.int64)
        ids, place = np.unique(tokens, return_inverse=True)
        counts = np.bincount(place[len(prompt) :], minlength=len(ids)).astype(np.int32)
        good = (ids >= 0) & (ids < self._vocab)
        self._seen.put(slot, id=ids[good], generated=counts[good])

    def clear(self, slot: int) -> None:
        """Forget a slot."""
        for rows in (self._seen, self._biases, self._early):
            rows.drop(slot)
        self._min_tokens[slot] = 0
        self._repetition[slot] = 1.0
        self._presence[slot] = 0.0
        self._frequency[slot] = 0.0

    def apply(self, logits: torch.Tensor, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        """Edit logits float32 [B, V] of slots int64 [B] in place; positions int64 [B], tokens generated before."""
        if len(self._seen):
            self._penalise(logits, slots)
        if len(self._biases):
            which, bias = self._biases.flat(slots)
            at = _upload(logits, which, bias["id"])
            logits.index_put_(at, _upload(logits, bias["value"])[0], accumulate=True)
        if len(self._early):
            early = np.flatnonzero(positions < self._min_tokens[slots])
            which, end = self._early.flat(slots[early])
            logits.index_put_(_upload(logits, early[which], end["id"]), logits.new_tensor(float("-inf")))

    def _penalise(self, logits: torch.Tensor, slots: NDArray[np.int64]) -> None:
        which, seen = self._seen.flat(slots)
        owner = slots[which]
        counts = seen["generated"].astype(np.float32)
        less = self._frequency[owner] * counts + self._presence[owner] * (counts > 0)
        at = _upload(logits, which, seen["id"])
        repetition, lowered = _upload(logits, self._repetition[owner], less)
        values = logits[at]
        values = torch.where(values > 0, values / repetition, values * repetition) - lowered
        logits.index_put_(at, values)

    def count(self, slots: NDArray[np.int64], tokens: NDArray[np.int32]) -> None:
        """Note the tokens int32 [n] that slots int64 [n] have just generated."""
        if len(self._seen):
            counted = self._seen.has(slots)
            self._seen.count(slots[counted], "id", tokens[counted], "generated")


def wants_penalty(sampling: Sampling) -> bool:
    """Say whether any penalty differs from "none"."""
    return (
        sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
    )


def _upload(beside: torch.Tensor, *arrays: NDArray[np.generic]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.from_numpy(array).to(beside.device) for array in arrays)
