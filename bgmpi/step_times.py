"""What a step takes: measured where it was measured, predicted where it was not (paper A6).

Decode steps only: a round with prompt tokens, or with tokens computed again, says nothing about the next one.  Each
figure is an average in which the newest round counts half.  For a number of sequences that no rank has had, the line
through its neighbours is taken; a single neighbour's time is taken to be half fixed and half its sequences'.

A group's first prediction is a lone step times the share that a rehearsal found; once a group has run, its own time
counts, but for its first round, which warms up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from bgmpi.primitives import Reported

_NEWEST = 0.5


class StepTimes:
    """Seconds of a step: by the number of sequences of a rank, and by the size of the group of one sequence.

    shares: what a step over a group of that size should take, as a share of a lone one; lockstep: all ranks make their
    steps together, so only the fullest one's time means anything.
    """

    def __init__(self, shares: Mapping[int, float], lockstep: bool) -> None:
        self._shares = shares
        self._lockstep = lockstep
        self._alone: dict[int, float] = {}
        self._sharded: dict[int, float] = {}
        self._tried: set[int] = set()
        self._seconds_a_token = 0.0

    @property
    def seconds_a_token(self) -> float:
        """Seconds of a rank for one token of one of its sequences; 0 before anything is known."""
        return self._seconds_a_token

    def note(self, reports: Sequence[Reported], size_led: NDArray[np.int64]) -> None:
        """Take the decode steps of one round.  size_led: int64 [ranks], the size of the group that each rank led in
        that round, 1 where it ran alone, 0 where another led it or it left its group."""
        clean = [one for one in reports if one.steps and one.generated_tokens and not one.prompt_tokens
                 and not one.wasted_tokens and one.seconds > 0]
        alone = [(max(1, round(one.generated_tokens / one.steps)), one) for one in clean if size_led[one.rank] == 1]
        if self._lockstep and alone:
            alone = [max(alone, key=lambda pair: pair[0])]
        for count, one in alone:
            _blend(self._alone, count, one.seconds / one.steps)
            token = one.seconds / one.generated_tokens
            old = self._seconds_a_token or token
            self._seconds_a_token = old + _NEWEST * (token - old)
        for one in clean:
            size = int(size_led[one.rank])
            if size > 1 and size in self._tried:
                _blend(self._sharded, size, one.seconds / one.steps)
            if size > 1:
                self._tried.add(size)

    def alone(self, count: int) -> float | None:
        """Return the seconds of a step of a rank that has `count` sequences; None when nothing was ever measured."""
        known = sorted(self._alone.items())
        if not known:
            return None
        if len(known) == 1:
            (have, seconds), = known
            return seconds * (0.5 + 0.5 * count / have)
        if count in self._alone:
            return self._alone[count]
        pairs = list(pairwise(known))
        (low, below), (high, above) = next((pair for pair in pairs if count < pair[1][0]), pairs[-1])
        slope = max(0.0, (above - below) / (high - low))
        return max(below + slope * (count - low), 0.25 * below)

    def over(self, size: int) -> float | None:
        """Return the seconds of a step of one sequence over a group; None when nothing was ever measured."""
        measured = self.measured(size)
        return self.predicted(size) if measured is None else measured

    def measured(self, size: int) -> float | None:
        """Return what a step over a group really took; None while no group of that size has run twice."""
        return self._sharded.get(size)

    def predicted(self, size: int) -> float | None:
        """Return what a step over a group should take; None for a size that was never rehearsed, and before anything
        was measured."""
        lone, share = self.alone(1), self._shares.get(size)
        return None if lone is None or share is None else lone * share


def _blend(times: dict[int, float], key: int, seconds: float) -> None:
    old = times.get(key, seconds)
    times[key] = old + _NEWEST * (seconds - old)
