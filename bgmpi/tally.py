"""What a rank did over the whole job: the way of each answer to the writer, and the counts that no answer tells.

Every finished answer and every refused row passes here once.  What answers tell of themselves is read from the
published file (`io.outcome`), which has those of all attempts.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from bgmpi.io.segments import SegmentWriter
from bgmpi.request import Answer


class Moves(Struct):
    """What ranks moved: sequences that came from another rank and the bytes copied for them, sequences that were led
    over a group, and bytes that were written to the disk tier."""

    migrated: int = 0
    partitioned: int = 0
    moved_bytes: int = 0
    spilled_bytes: int = 0


class Counts(Struct):
    """Plain counts that cross ranks.  routed: int64 [experts], tokens of this rank that went to each."""

    routed: NDArray[np.int64]
    moves: Moves


class Tally:
    """Hands answers to this rank's writer."""

    def __init__(self, writer: SegmentWriter) -> None:
        self._writer = writer

    def take(self, answer: Answer) -> None:
        """Store one finished answer or refused row.  Raises WriteError when a due segment cannot be written."""
        self._writer.add(answer)
        self._writer.flush_if_due()


def total(counts: Iterable[Counts]) -> Counts:
    """Return the sum over ranks."""
    everyone = list(counts)
    return Counts(
        np.sum([one.routed for one in everyone], axis=0),
        Moves(
            sum(one.moves.migrated for one in everyone),
            sum(one.moves.partitioned for one in everyone),
            sum(one.moves.moved_bytes for one in everyone),
            sum(one.moves.spilled_bytes for one in everyone),
        ),
    )
