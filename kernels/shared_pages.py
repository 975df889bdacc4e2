"""Which sequences of a micro-batch begin with the same pages, and how far.

Sequences share a page if all their page numbers up to it are the same and it lies wholly before the new tokens of each
of them; then its keys and values are the same for all, whoever wrote them.  Sorted by their page numbers, sequences
that share stand side by side, whatever their order in the batch: every depth at which neighbours part closes a run of
members, and the runs are nested as the prefixes are (a document, its sections, their questions).  A stretch is what a
run shares beyond the run around it.  A stretch too short to pay for joining its part is left to the runs within.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: Tokens that a stretch has at least.
LEAST_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Stretch:
    """Cached tokens begin .. end - 1, the same for all members: sequence numbers int64 [n], n >= 2."""

    members: NDArray[np.int64]
    begin: int
    end: int


def find_stretches(pages: NDArray[np.int32], shareable: NDArray[np.int64], page_tokens: int) -> list[Stretch]:
    """Return the stretches of a micro-batch, shallow ones before those behind them.

    pages int32 [S, widest]: page numbers; shareable int64 [S]: of how many leading pages others may have a share, 0 for
    a sequence that takes no part.
    """
    able = np.flatnonzero(shareable > 0)
    if len(able) < 2:
        return []
    lead = np.sort(pages[able, 0])
    twice = lead[1:][lead[1:] == lead[:-1]]
    if not len(twice):
        return []
    able = able[np.isin(pages[able, 0], twice)]
    depth, order = _common_pages(pages[able], shareable[able])
    able = able[order]
    stretches, covered = [], np.zeros(len(able), np.int64)
    for level in np.unique(depth[depth > 0]):
        inside = depth >= level  # pairs of neighbours that share at least so many pages
        edges = np.flatnonzero(np.diff(np.concatenate([[False], inside, [False]]).astype(np.int8)))
        least = np.minimum.reduceat(np.append(depth, 0), edges)[::2]  # more than level: the run reaches further
        low, high = edges[::2], edges[1::2]  # rows low .. high are of one run
        worth = (least == level) & ((level - covered[low]) * page_tokens >= LEAST_TOKENS)
        for first, last in zip(low[worth].tolist(), high[worth].tolist(), strict=True):
            begin = int(covered[first]) * page_tokens
            stretches.append(Stretch(np.sort(able[first : last + 1]), begin, int(level) * page_tokens))
            covered[first : last + 1] = level
    return stretches


def _common_pages(
    pages: NDArray[np.int32], shareable: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sort rows by their shareable pages -> how many leading ones each has in common with the next, and the order."""
    widest = int(shareable.max())
    kept = np.where(np.arange(widest) < shareable[:, None], pages[:, :widest], -1)
    keys = np.ascontiguousarray(kept.astype(">i4")).view(f"S{4 * widest}")[:, 0]
    order = np.argsort(keys, kind="stable")
    kept = kept[order]
    same = (kept[1:] == kept[:-1]) & (kept[1:] >= 0)
    return np.where(same.all(1), widest, same.argmin(1)), order
