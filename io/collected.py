"""All answers that count: those of every valid segment of a folder, as rows of the present input.

Attempts may have had another input, and errors may be meant to be tried again (`attempts.RowMap`).  Should a row have
been answered by several attempts (a segment that was away came back), the newest one's answers count.  Twice within one
attempt is a fault of the program, and is left for `publish` to find (law 5).

Only numbers are read, some 50 bytes an answer; answers stay in their segments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bgmpi.errors import InternalError
from bgmpi.io.attempts import GONE, RowMap
from bgmpi.io.columns import Index, Table, entry_bytes, to_answers
from bgmpi.io.journal import Entry, JournalReading, read_journal
from bgmpi.io.segments import Segment, attempt_of
from bgmpi.request import Answer


class Source(Protocol):
    """A file of answers: a segment, or a published file."""

    def take(self, entry: Index) -> Table:
        """Return the entries `entry` int64 [k], in that order, with every column of a segment."""


@dataclass(frozen=True, slots=True)
class Collected:
    """Answers [k] in no promised order.

    segment: int64, which of `segments` holds it, entry: int64, at which place; row: int64; sample: int32, -1 where one
    entry stands for a refused row; is_error: bool; bytes: int64, what it takes.  progress: (attempt, file) of what
    unfinished sequences had.
    """

    segments: Sequence[Source]
    segment: Index
    entry: Index
    row: Index
    sample: NDArray[np.int32]
    is_error: NDArray[np.bool_]
    bytes: Index
    journal: JournalReading
    damaged: tuple[str, ...]
    progress: list[tuple[int, Table]] = field(default_factory=list)


def collect(folder: Path, maps: Mapping[int, RowMap] | None = None, *, verify: bool = True) -> Collected:
    """Return the answers that count.

    maps: by attempt; files of an attempt that is not named are damaged.  None: rows are taken as they are written.
    """
    journal = read_journal(folder, verify=verify)
    damaged = list(journal.damaged)
    segments: list[Segment] = []
    attempts: list[int] = []
    parts: list[tuple[NDArray[Any], ...]] = []
    for number, opened, table in _opened(folder, journal.entries, maps, damaged, Segment.numbers):
        segments.append(opened)
        attempts.append(number)
        parts.append(_numbers(table, maps[number] if maps is not None else RowMap()))
    counts = np.array([len(part[0]) for part in parts], np.int64)
    segment = np.repeat(np.arange(len(segments)), counts)
    attempt = np.repeat(np.array(attempts, np.int64), counts)
    entry, row, sample, is_error, size = _joined(parts)
    keep = np.flatnonzero(_newest(row, sample, attempt))
    progress = [(number, table) for number, _, table in _opened(folder, journal.progress, maps, damaged, Segment.table)]
    return Collected(
        segments, segment[keep], entry[keep], row[keep], sample[keep], is_error[keep], size[keep], journal,
        progress=progress, damaged=tuple(damaged),
    )  # fmt: skip


def begun(maps: Mapping[int, RowMap], finished: Collected) -> dict[tuple[int, int], Answer]:
    """Return what unfinished sequences have so far, by row of the present input and sample: of all that attempts left,
    the one with most tokens.  Sequences that are finished by now are left out."""
    ended = set(zip(finished.row.tolist(), finished.sample.tolist(), strict=True))
    found: dict[tuple[int, int], Answer] = {}
    for number, progress in finished.progress:
        rows = maps[number].now(progress.fixed["samples/row"]).tolist()
        for row, answer in zip(rows, to_answers(progress, {}), strict=True):
            name = row, answer.sample
            best = found.get(name)
            if row != GONE and name not in ended and (best is None or len(best.tokens) < len(answer.tokens)):
                found[name] = answer
    return found


def counting(row: Index, is_error: NDArray[np.bool_], how: RowMap) -> tuple[Index, Index]:
    """Return the places of the answers [k] that count, and their rows of the present input."""
    counts = np.ones(len(row), bool) if how.errors else ~is_error
    if how.rows is not None:
        row = how.now(row)
        counts &= row != GONE
    at = np.flatnonzero(counts)
    return at, row[at]


# --- inside ---------------------------------------------------------------------------------------------------------


def _opened(
    folder: Path, entries: Sequence[Entry], maps: Mapping[int, RowMap] | None, damaged: list[str],
    read: Callable[[Segment], Table],
) -> Iterator[tuple[int, Segment, Table]]:  # fmt: skip
    """Yield attempt, file and columns of each entry that can be used, and name in `damaged` those that cannot."""
    for one in entries:
        number = attempt_of(one.name)
        if maps is not None and number not in maps:
            damaged.append(f"{one.name} ({one.records} answers): nothing is known of attempt {number}")
            continue
        try:
            opened = Segment(folder / one.name)
            table = read(opened)
        except InternalError as error:  # whole, but of another version, or none of ours
            damaged.append(f"{one.name} ({one.records} answers): {error}")
            continue
        yield number, opened, table


def _numbers(table: Table, how: RowMap) -> tuple[NDArray[Any], ...]:
    """Return entry, row, sample, is_error and bytes of the answers of one segment that count."""
    is_error = table.fixed["errors/present"] != 0
    at, row = counting(table.fixed["samples/row"], is_error, how)
    return at, row, table.fixed["samples/sample"][at], is_error[at], entry_bytes(table)[at]


def _joined(parts: list[tuple[NDArray[Any], ...]]) -> tuple[NDArray[Any], ...]:
    kinds = (np.int64, np.int64, np.int32, np.bool_, np.int64)
    return tuple(
        np.concatenate([np.empty(0, kind), *(part[place] for part in parts)]) for place, kind in enumerate(kinds)
    )


def _newest(row: Index, sample: NDArray[np.int32], attempt: Index) -> NDArray[np.bool_]:
    """Say which answers count, bool [k]: those of the newest attempt that answered a sample, or refused its row."""
    keep = np.ones(len(row), bool)
    if not len(row):
        return keep
    order = np.lexsort((attempt, sample, row))
    r, s, a = row[order], sample[order], attempt[order]
    last = np.append((r[1:] != r[:-1]) | (s[1:] != s[:-1]), True)
    group = np.cumsum(np.append(True, last[:-1])) - 1
    keep[order] = a == a[last][group]
    whole = np.full(int(row.max()) + 1, -1, np.int64)
    single = whole.copy()
    np.maximum.at(whole, row[sample < 0], attempt[sample < 0])
    np.maximum.at(single, row[sample >= 0], attempt[sample >= 0])
    other = np.where(sample < 0, single[row], whole[row])
    return keep & (attempt >= other)
