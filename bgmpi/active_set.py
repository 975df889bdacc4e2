"""The active sequences of one rank as rows of arrays, one slot each (paper A2: all that a coroutine must carry).

Pure bookkeeping: who is in which slot, what is known of each and how much of it has KV.  It knows neither pages nor
reasons; the sequence manager decides who comes and goes.  Rejected: one object per sequence, because a step then costs
Python time per sequence.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bgmpi.backlog import Entry
from bgmpi.errors import InternalError
from bgmpi.fairness import levels_of
from bgmpi.primitives import Ids

Slots = NDArray[np.int64]
EMPTY = -1


class ActiveSet:
    """One row a slot; rows of empty slots mean nothing.

    sequence: int64 [slots], -1 where empty; known, with_kv, prompt, most, order: int64 [slots], tokens (prompt and
    generated) known, those of them with KV, tokens of the prompt, the longest it may become, and its order
    (smaller is older); tokens: int32 [slots, widest].  slots: int64 [S], those in use, oldest first.
    """

    def __init__(self, slots: int, most_tokens: int) -> None:
        self.sequence: NDArray[np.int64] = np.full(slots, EMPTY, np.int64)
        self.known: NDArray[np.int64] = np.zeros(slots, np.int64)
        self.with_kv: NDArray[np.int64] = np.zeros(slots, np.int64)
        self.prompt: NDArray[np.int64] = np.zeros(slots, np.int64)
        self.most: NDArray[np.int64] = np.zeros(slots, np.int64)
        self.order: NDArray[np.int64] = np.zeros(slots, np.int64)
        self.tokens: NDArray[np.int32] = np.zeros((slots, min(256, most_tokens)), np.int32)
        self.slots: Slots = np.empty(0, np.int64)
        self._most_tokens = most_tokens
        self._free: list[int] = list(range(slots - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def free(self) -> int:
        """Empty slots."""
        return len(self._free)

    def next_free(self) -> int:
        """Return the slot that `place` will fill next; there must be one."""
        return self._free[-1]

    def place(self, order: int, entry: Entry) -> int:
        """Put a sequence into the next empty slot -> the slot."""
        slot, size = self._free.pop(), len(entry.tokens)
        self._widen(entry.most)
        self.tokens[slot, :size] = entry.tokens
        self.sequence[slot] = entry.sequence
        self.known[slot] = size
        self.with_kv[slot] = entry.with_kv
        self.prompt[slot] = entry.prompt
        self.most[slot] = entry.most
        self.order[slot] = order
        at = int(np.searchsorted(self.order[self.slots], order))
        self.slots = np.insert(self.slots, at, slot)
        return slot

    def remove(self, slots: Slots) -> None:
        """Empty these slots."""
        self.slots = self.slots[~np.isin(self.slots, slots)]
        self.sequence[slots] = EMPTY
        self._free.extend(slots.tolist())

    def slots_of(self, sequences: Ids) -> Slots:
        """Return the slots of active sequences, int64 [k], in the order named; raises InternalError for another."""
        found = {int(self.sequence[slot]): slot for slot in self.slots.tolist()}
        missing = [one for one in sequences.tolist() if one not in found]
        if missing:
            raise InternalError(f"sequences {missing} are not active on this rank")
        return np.array([found[one] for one in sequences.tolist()], np.int64)

    def decoded(self, slots: Slots) -> NDArray[np.int64]:
        """Return how many tokens these have generated, int64 [k]."""
        generated: NDArray[np.int64] = self.known[slots] - self.prompt[slots]
        return generated

    def level(self, slots: Slots) -> NDArray[np.int64]:
        """Return how urgent these are, int64 [k], 0 the most urgent."""
        return levels_of(self.order[slots])

    def generated(self, slot: int) -> NDArray[np.int32]:
        """Return a copy of the tokens that a sequence has generated, int32 [n]."""
        return self.tokens[slot, self.prompt[slot] : self.known[slot]].copy()

    def missing(self, slots: Slots) -> NDArray[np.int64]:
        """Return how many known tokens lack KV, int64 [k]."""
        lacking: NDArray[np.int64] = self.known[slots] - self.with_kv[slots]
        return lacking

    def check(self) -> None:
        """Raise InternalError unless every slot is empty or in use and the counts of each make sense."""
        if len(self.slots) + len(self._free) != len(self.sequence):
            raise InternalError(f"{len(self.slots)} active + {len(self._free)} free slots do not fill the rank")
        known, with_kv, most = self.known[self.slots], self.with_kv[self.slots], self.most[self.slots]
        if ((with_kv > known) | (known > most)).any():
            raise InternalError("with_kv <= known <= most does not hold for every active sequence")
        if (np.diff(self.order[self.slots]) < 0).any():
            raise InternalError("the active sequences do not stand in their order")

    def _widen(self, width: int) -> None:
        have = self.tokens.shape[1]
        if width > have:
            grown = np.zeros((len(self.tokens), min(self._most_tokens, max(width, 2 * have))), np.int32)
            # Rows of empty slots are left untouched, so that the system gives them no memory.
            grown[self.slots, :have] = self.tokens[self.slots]
            self.tokens = grown
