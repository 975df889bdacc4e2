"""How long answers become, guessed from their cap: what share of it they take, learnt from those that have ended.

A cap says little about an answer's length, but rows of one cap tend to be of one kind.  So caps are put into buckets by
powers of two, and each keeps the tokens and the caps of the answers that ended in it; the share is their quotient.
Before any has ended one answer as long as its cap is taken for granted, which a few real ones outweigh.

What ends first is short, so early shares are too small, in all buckets alike; rows are only compared with one another.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bgmpi.primitives import Counts

#: Bucket b holds the caps of b binary digits.
_BUCKETS = 64
#: A share that changed by more than this part of itself changes the order.
_MUCH = 0.1


class AnswerLengths:
    """Expected lengths of answers.  share: expected tokens for each token of cap, float64 [buckets]."""

    def __init__(self) -> None:
        self._caps: NDArray[np.float64] = np.ldexp(1.0, np.arange(_BUCKETS)).astype(np.float64)
        self._tokens: NDArray[np.float64] = self._caps.copy()

    @property
    def share(self) -> NDArray[np.float64]:
        """Expected tokens for each token of cap, float64 [buckets]."""
        share: NDArray[np.float64] = self._tokens / self._caps
        return share

    def learn(self, answered: Counts) -> None:
        """Take answers that ended: int64 [k, 2], the cap of each and its tokens."""
        answered = answered.reshape(-1, 2)
        bucket = _bucket(answered[:, 0])
        self._caps += np.bincount(bucket, answered[:, 0], _BUCKETS)
        self._tokens += np.bincount(bucket, answered[:, 1], _BUCKETS)

    def expected(self, cap: NDArray[np.int64] | NDArray[np.int32]) -> NDArray[np.float64]:
        """Return the tokens that answers of these caps, [n], should have, float64 [n]."""
        expected: NDArray[np.float64] = cap * self.share[_bucket(cap)]
        return expected

    def moved(self, since: NDArray[np.float64]) -> bool:
        """Say whether some share is another one than it was, by so much that an order made then should be made anew."""
        return bool((np.abs(self.share - since) > _MUCH * since).any())


def _bucket(cap: NDArray[np.int64] | NDArray[np.int32]) -> NDArray[np.int64]:
    """Return how many binary digits each cap has, int64 [n]."""
    return np.frexp(cap.astype(np.float64))[1].astype(np.int64)
