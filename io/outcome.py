"""What a job came to, read from the file that it published: for the last page of a run, whatever attempts it took.

The published file is the only place that has every answer of every attempt, so counts and times are read back from it
and not gathered from ranks, each of which knows its own last attempt only.  Whole columns of numbers are read, some 40
bytes an answer; of the texts only those that are shown.  It knows of the input what the file does not say: priorities
and deadlines.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from bgmpi.io.columns import FINISH
from bgmpi.io.results_file import Results, open_results

#: Rows whose prompt and answer are shown, and priorities that have a line of their own.
_SHOWN_ROWS = 4
_SHOWN_CLASSES = 8
_PERCENTILES = (50, 95, 99)
_Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ClassTimes:
    """The rows of one priority: when half, 95 % and 99 % of the good ones had all their answers, in seconds of the
    job; NaN when there is none."""

    priority: int
    rows: int
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Numbers of a whole job.

    finish: good samples by finish reason; errors: errors by code; default_capped: samples that ended at a cap that
    their request did not set.  sct: 50th, 95th and 99th percentile of the seconds from queued to done of good samples;
    last_first: seconds of the job when the last sequence to begin had its first token; NaN when there is none.
    classes: the most urgent priorities, more_classes how many others there are; both empty where all rows have the
    same.  in_time, late: rows with a deadline that had all their answers by then, and those that had not, error rows
    among them.  shown: (row, answer) of the first good rows.
    """

    finish: dict[str, int]
    errors: dict[str, int]
    default_capped: int
    sct: tuple[float, float, float]
    last_first: float
    classes: list[ClassTimes] = field(default_factory=list)
    more_classes: int = 0
    in_time: int = 0
    late: int = 0
    shown: list[tuple[int, str]] = field(default_factory=list)


def read_outcome(
    path: str | os.PathLike[str],
    priority: NDArray[np.int32] | None = None,
    deadline: NDArray[np.float32] | None = None,
) -> Outcome:
    """Read it from the published file.  priority: int32 [rows]; deadline: float32 [rows], seconds of the job, infinity
    where there is none; None where no row has one."""
    with open_results(path) as results:
        finish, done = results.finish_reason, results.column("samples/done")
        good = finish != FINISH["error"]
        first_token = results.column("samples/first_token")[good]
        answered = _answered(done, good, results.first_sample)
        classes, more = ([], 0) if priority is None else _classes(priority, answered)
        in_time, late = (0, 0) if deadline is None else _deadlines(deadline, answered)
        return Outcome(
            finish={name: int(np.count_nonzero(finish == code)) for name, code in FINISH.items() if name != "error"},
            errors=error_codes(results),
            default_capped=int(results.column("samples/default_cap")[good].sum()),
            sct=_percentiles((done - results.column("samples/queued"))[good]),
            last_first=float(np.fmax.reduce(first_token, initial=np.nan)),
            classes=classes,
            more_classes=more,
            in_time=in_time,
            late=late,
            shown=[(one.row, one.samples[0].text) for one in results.rows(0, _SHOWN_ROWS) if one.error is None],
        )


def error_codes(results: Results) -> dict[str, int]:
    """Return how many errors there are of each code, the most frequent first."""
    values = results.column("errors/code/values").tobytes()
    cuts = results.column("errors/code/offsets").tolist()
    return dict(Counter(values[start:stop].decode() for start, stop in pairwise(cuts)).most_common())


# --- inside ---------------------------------------------------------------------------------------------------------


def _answered(done: _Seconds, good: NDArray[np.bool_], first_sample: NDArray[np.int64]) -> _Seconds:
    """Return when each row had all its answers, seconds float64 [rows]; NaN for a row with an error."""
    if len(first_sample) < 2:
        return np.empty(0)
    return np.maximum.reduceat(np.where(good, done, np.nan), first_sample[:-1])


def _percentiles(seconds: _Seconds) -> tuple[float, float, float]:
    known = seconds[np.isfinite(seconds)]
    if not len(known):
        return (float("nan"),) * 3
    p50, p95, p99 = np.percentile(known, _PERCENTILES).tolist()
    return p50, p95, p99


def _classes(priority: NDArray[np.int32], answered: _Seconds) -> tuple[list[ClassTimes], int]:
    """Return the times of the most urgent priorities, and how many others there are; none where there is only one."""
    found, counts = np.unique(priority, return_counts=True)
    if len(found) < 2:
        return [], 0
    told = [
        ClassTimes(one, rows, *_percentiles(answered[priority == one]))
        for one, rows in zip(found[:_SHOWN_CLASSES].tolist(), counts.tolist(), strict=False)
    ]
    return told, len(found) - len(told)


def _deadlines(deadline: NDArray[np.float32], answered: _Seconds) -> tuple[int, int]:
    has = np.isfinite(deadline)
    in_time = int(np.count_nonzero(answered[has] <= deadline[has]))
    return in_time, int(np.count_nonzero(has)) - in_time
