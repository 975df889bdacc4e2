"""What a rank has answered over the whole job: the counts of the summary, and the way of each answer to the writer.

Every finished answer and every refused row passes here once.  Only numbers are kept (and the texts of the first few
rows, to be shown at the end), so memory does not grow with the answers.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from bgmpi.io.segments import SegmentWriter
from bgmpi.request import Answer

SHOWN_ROWS = 4


class Moves(Struct):
    """What ranks moved: sequences that came from another rank and the bytes copied for them, sequences that were led
    over a group, and bytes that were written to the disk tier."""

    migrated: int = 0
    partitioned: int = 0
    moved_bytes: int = 0
    spilled_bytes: int = 0


class Counts(Struct):
    """Plain counts that cross ranks.  seconds: float64 [sequences], completion time of each good sequence; routed:
    int64 [experts], tokens of this rank that went to each; shown: (row, answer text) of the first rows."""

    finish: dict[str, int]
    errors: dict[str, int]
    default_capped: int
    seconds: NDArray[np.float64]
    routed: NDArray[np.int64]
    shown: list[tuple[int, str]]
    moves: Moves


class Tally:
    """Hands answers to this rank's writer and counts them."""

    def __init__(self, writer: SegmentWriter) -> None:
        self._writer = writer
        self._finish: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._default_capped = 0
        self._seconds = array("d")
        self._shown: list[tuple[int, str]] = []

    def take(self, answer: Answer) -> None:
        """Store one finished answer or refused row.  Raises WriteError when a due segment cannot be written."""
        self._writer.add(answer)
        self._writer.flush_if_due()
        if answer.error is not None:
            self._errors[answer.error.code] += 1
            return
        self._finish[answer.finish.name.lower()] += 1
        self._default_capped += answer.default_cap
        self._seconds.append(answer.done_s - answer.queued_s)
        if answer.row < SHOWN_ROWS and answer.sample == 0:
            self._shown.append((answer.row, answer.text))

    def counts(self, routed: NDArray[np.int64], moves: Moves) -> Counts:
        """Return what was counted so far."""
        return Counts(
            dict(self._finish),
            dict(self._errors),
            self._default_capped,
            np.array(self._seconds, np.float64),
            routed,
            self._shown,
            moves,
        )


def total(counts: Iterable[Counts]) -> Counts:
    """Return the sum over ranks."""
    everyone = list(counts)
    finish: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    for one in everyone:
        finish.update(one.finish)
        errors.update(one.errors)
    return Counts(
        dict(finish),
        dict(errors),
        sum(one.default_capped for one in everyone),
        np.concatenate([one.seconds for one in everyone]),
        np.sum([one.routed for one in everyone], axis=0),
        sorted(shown for one in everyone for shown in one.shown),
        Moves(
            sum(one.moves.migrated for one in everyone),
            sum(one.moves.partitioned for one in everyone),
            sum(one.moves.moved_bytes for one in everyone),
            sum(one.moves.spilled_bytes for one in everyone),
        ),
    )
