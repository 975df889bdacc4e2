"""What a rank computed, in tokens: of prompts, of answers, twice, and not at all because another sequence had.

A sequence that gives its KV up computes it again; those tokens are wasted, and counted once more when they come.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bgmpi.primitives import Ids


@dataclass(slots=True)
class TokenCounts:
    """Tokens since the last `take`.

    prompt, generated: computed; wasted: of them those computed again; reused: of prompts, whose KV another sequence
    had.
    """

    prompt: int = 0
    generated: int = 0
    wasted: int = 0
    reused: int = 0
    _lost: dict[int, int] = field(default_factory=dict)

    def take(self) -> TokenCounts:
        """Return the counts and begin anew; what was lost and not computed again yet stays known."""
        taken = TokenCounts(self.prompt, self.generated, self.wasted, self.reused)
        self.prompt = self.generated = self.wasted = self.reused = 0
        return taken

    def step(
        self, sequences: Ids, prompt: NDArray[np.int64], before: NDArray[np.int32], count: NDArray[np.int32], drawn: int
    ) -> None:
        """Count a step: `count` int32 [S] tokens of each sequence behind `before`, int32 [S], with KV; prompt: int64
        [S], tokens of their prompts; drawn: tokens generated."""
        self.prompt += int(np.clip(prompt - before, 0, count).sum())
        self.generated += drawn
        if not self._lost:
            return
        for sequence, first, size in zip(sequences.tolist(), before.tolist(), count.tolist(), strict=True):
            again = self._lost.get(sequence)
            if again is not None:
                self.wasted += min(size, max(0, again - first))
                if first + size >= again:
                    del self._lost[sequence]

    def lose(self, sequence: int, with_kv: int) -> None:
        """Note that a sequence gave up the KV of so many tokens."""
        self._lost[sequence] = with_kv

    def reuse(self, sequence: int, tokens: int) -> None:
        """Note that a sequence begins with the KV of so many tokens that another computed."""
        if sequence not in self._lost:
            self.reused += tokens

    def forget(self, sequence: int) -> None:
        """Note that a sequence runs elsewhere now."""
        self._lost.pop(sequence, None)
