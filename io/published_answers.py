"""A published file as a source of answers: its entries with the columns of a segment, block by block.

So the answers of a file that was published once can be published again: joined with other shards' (`merge`), or beside
rows that were added, edited or tried again (`reopen`).  Whatever column a segment has comes back bit for bit.

Reads follow the file: entries that are asked for together should lie together, for all between the first and the last
are read.  Memory is what is asked for and some bytes a row.  The file is opened for each read and never for writing, so
a thousand of them need no more files open than one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np

from bgmpi.errors import InputError
from bgmpi.io.columns import DTYPES, FIXED, OFFSETS, RAGGED, Array, Index, Table, cuts_by_bytes, spread_out
from bgmpi.io.results_file import Results, open_results

_ROWS = tuple(path for path in OFFSETS if path.startswith("rows/"))
_ERRORS = tuple(path for path in OFFSETS if path.startswith("errors/"))
_SAMPLES = tuple(path for path in OFFSETS if not path.startswith(("rows/", "errors/")))
_SAMPLES_FIXED = tuple(path for path in FIXED if path.startswith("samples/") and path != "samples/row")


class PublishedAnswers:
    """The answers of one published file; entry i is its i-th sample.

    rows: of the file; row: int64 [entries], as the file numbers them; is_error: bool [entries]; sample: int32
    [entries], -1 where an error is its row's only entry, for it may stand for a whole row that was refused; bytes:
    int64 [entries], what each takes in a segment.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Read the numbers of `path`; raise what `open_results` raises."""
        with open_results(path) as results:
            self.path = results.path
            self._stamp = _stamp(self.path)
            samples = np.diff(results.first_sample)
            self.rows = len(samples)
            self.row: Index = np.repeat(np.arange(self.rows), samples)
            self.sample = results.column("samples/sample").astype(np.int32)
            failed = results.column("errors/row")
            self._errors: Index = results.first_sample[failed] + results.column("errors/sample")
            self.is_error = np.zeros(len(self.row), bool)
            self.is_error[self._errors] = True
            self.sample[self._errors[samples[failed] == 1]] = -1
            self.bytes = self._entry_bytes(results)

    def blocks(self, block_bytes: int) -> Iterator[Table]:
        """Yield all entries in order, about `block_bytes` at once."""
        ends = np.concatenate([[0], np.cumsum(self.bytes)])
        for start, stop in cuts_by_bytes(ends, block_bytes):
            yield self.table(start, stop)

    def take(self, entry: Index) -> Table:
        """Return the entries `entry` int64 [k], in that order; all between the first and the last of them are read."""
        if not len(entry):
            return self.table(0, 0)
        start = int(entry.min())
        return self.table(start, int(entry.max()) + 1).take(entry - start)

    def table(self, start: int, stop: int) -> Table:
        """Return the entries `start` to `stop` with every column of a segment."""
        row = self.row[start:stop]
        begin, end = (int(row[0]), int(row[-1]) + 1) if len(row) else (0, 0)
        low, high = np.searchsorted(self._errors, [start, stop]).tolist()
        place = self._errors[low:high] - start
        with _Columns(self.path, self._stamp) as columns:
            fixed = {path: columns.read(path, start, stop) for path in _SAMPLES_FIXED}
            samples = columns.ragged(_SAMPLES, start, stop)
            names = columns.ragged(_ROWS, begin, end).take(row - begin)
            errors = spread_out(columns.ragged(_ERRORS, low, high), place, stop - start)
            line = columns.read("errors/line", low, high)
        fixed["samples/row"], fixed["samples/sample"] = row, self.sample[start:stop]
        fixed["errors/present"] = self.is_error[start:stop].astype(DTYPES["errors/present"])
        fixed["errors/line"] = np.zeros(stop - start, DTYPES["errors/line"])
        fixed["errors/line"][place] = line
        return Table(
            stop - start,
            fixed,
            {path: part.offsets[path] for part in (samples, names, errors) for path in part.offsets},
            {path: part.values[path] for part in (samples, names, errors) for path in part.values},
        )

    def _entry_bytes(self, results: Results) -> Index:
        fixed = sum(dtype.itemsize for dtype in FIXED.values()) + 8 * len(OFFSETS)
        total = np.full(len(self.row), fixed, np.int64)
        for at, dtype in RAGGED.values():
            size = np.diff(results.column(at)) * dtype.itemsize
            if at in _ERRORS:
                total[self._errors] += size
            else:
                total += size[self.row] if at in _ROWS else size
        return total


class _Columns:
    """Columns of a published file, while it is open."""

    def __init__(self, path: Path, stamp: tuple[int, ...]) -> None:
        self._path = path
        try:
            self._file = h5py.File(path, "r")
            if _stamp(path) != stamp:
                self._file.close()
                raise InputError(f"{path} was replaced while it was read; leave it alone and run again")
        except OSError as error:
            raise InputError(f"{path} cannot be read any more: {error}") from error

    def __enter__(self) -> _Columns:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, path: str, start: int, stop: int) -> Array:
        """Return values `start` to `stop` of a column as a segment has them."""
        try:
            return np.asarray(self._file[path][start:stop], DTYPES[path])
        except (OSError, KeyError) as error:
            raise InputError(f"{self._path}: dataset {path!r} is damaged and cannot be read: {error}") from error

    def ragged(self, offsets: tuple[str, ...], start: int, stop: int) -> Table:
        """Return the ragged columns that share `offsets`, entries `start` to `stop`."""
        cuts = {path: self.read(path, start, stop + 1) for path in offsets}
        values = {
            path: self.read(path, int(cuts[at][0]), int(cuts[at][-1]))
            for path, (at, _) in RAGGED.items()
            if at in cuts
        }
        return Table(stop - start, {}, {path: cut - cut[0] for path, cut in cuts.items()}, values)


def _stamp(path: Path) -> tuple[int, ...]:
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
