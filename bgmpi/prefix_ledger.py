"""Rank 0's list of who is still to come for each shared prefix, so that ranks know when to let its KV go.

A rank keeps the KV of a prefix while sequences that begin with it may still arrive.  Sequences leave the list when they
are handed to a rank, or when their row turns out to be an error.  The last one's rank is told with the sequence itself
that nobody comes behind it; all ranks that were told otherwise before hear of it through `take_closed`.

Invariant: a prefix of which a rank was told that more will come is closed exactly once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bgmpi.errors import InternalError
from bgmpi.share_plan import SharePlan, sums_below
from bgmpi.shared_prefixes import Prefix


class PrefixLedger:
    """Who is still to come for each node of a plan.  weight: sequences of each prompt to be computed, int32
    [prompts]."""

    def __init__(self, plan: SharePlan, weight: NDArray[np.int32]) -> None:
        self._plan = plan
        self._left = sums_below(plan.parent, plan.node, weight)
        self._told = bytearray(len(plan.depth))
        self._closed: list[int] = []

    def leave(self, prompt: int, sequences: int) -> None:
        """Note that so many sequences of a prompt are not to come any more: a rank has them, or nobody ever will."""
        for node in self._plan.path(prompt):
            self._left[node] -= sequences
            if not self._left[node] and self._told[node]:
                self._told[node] = 0
                self._closed.append(node)

    def prefixes(self, prompt: int) -> tuple[Prefix, ...]:
        """Return what a prompt shares, shallow before deep, as a rank that is given it should hear it now."""
        found = []
        for node in self._plan.path(prompt):
            more = bool(self._left[node])
            self._told[node] |= more
            found.append(Prefix(node, int(self._plan.depth[node]), more))
        return tuple(found)

    def take_closed(self) -> list[int]:
        """Return the nodes to which nobody comes any more, of which some rank was told otherwise, once."""
        closed, self._closed = self._closed, []
        return closed

    def check(self) -> None:
        """Raise InternalError if somebody left who was never there."""
        if (self._left < 0).any():
            node = int(np.flatnonzero(self._left < 0)[0])
            raise InternalError(f"{-int(self._left[node])} more sequences left prefix {node} than it had")
