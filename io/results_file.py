"""Read the published results: numpy columns for analysis, rows for everything else.

The file is plain HDF5 and `docs/results.md` shows how to read it with h5py alone; this reader adds what such a reader
must otherwise write: offsets to text, rows to samples, errors to rows, and plain words when the file is not one of
ours, not complete or damaged.  Columns are read when asked for; rows are read in blocks, so a file far bigger than
memory can be walked through.  It never opens a file for writing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from bgmpi.errors import BgmpiError, InputError, MissingError, RowError
from bgmpi.io.columns import FIXED, OFFSETS, RAGGED, Array, Index, Table, cuts_by_bytes, row_errors, to_answers
from bgmpi.io.durable import LOCK_ADVICE, LOCKED
from bgmpi.io.publish import FORMAT, FORMAT_VERSION
from bgmpi.request import Answer

_ROW_OFFSETS = tuple(path for path in OFFSETS if path.startswith("rows/"))
_ERROR_OFFSETS = tuple(path for path in OFFSETS if path.startswith("errors/"))
_SAMPLE_OFFSETS = tuple(path for path in OFFSETS if not path.startswith(("rows/", "errors/")))
_SAMPLE_FIXED = tuple(path for path in FIXED if path.startswith("samples/") and path != "samples/row")
_BLOCK_ROWS = 4096


@dataclass(frozen=True, slots=True)
class RowResult:
    """One request of the input.

    `samples` are its answers, sample 0 first; a refused row has one, without tokens.  `error` is the first error of its
    samples, None for a row that is done.  `prompts` is how many prompts share the samples evenly.
    """

    row: int
    custom_id: str
    url: str
    samples: tuple[Answer, ...]
    error: RowError | None
    prompts: int = 1


class Results:
    """A published file, open for reading; `len` is the number of rows.  Close it, or use it in a `with` block."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open `path`.

        Raise MissingError when it is not there, InputError when it is locked, foreign, newer than this or not complete.
        """
        self.path = Path(path)
        self._file = _open(self.path)
        try:
            self.attributes: dict[str, Any] = {name: _plain(value) for name, value in self._file.attrs.items()}
            _check(self.path, self.attributes)
            #: int64 [rows + 1]: row i has the samples first_sample[i] to first_sample[i + 1].
            self.first_sample: Index = self.column("rows/first_sample")
            self._error_rows: Index = self.column("errors/row")
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file; arrays that were read stay valid."""
        self._file.close()

    def __enter__(self) -> Results:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self.first_sample) - 1

    # --- columns --------------------------------------------------------------------------------------------------

    def column(self, path: str, start: int = 0, stop: int | None = None) -> Array:
        """Return entries `start` to `stop` of the dataset `path` as a numpy array."""
        try:
            return np.asarray(self._file[path][start:stop])
        except KeyError:
            raise InputError(f"{self.path} has no dataset {path!r}; see docs/results.md for those it has") from None
        except OSError as error:
            raise InputError(f"{self.path}: dataset {path!r} is damaged and cannot be read: {error}") from error

    def has(self, path: str) -> bool:
        """Say whether there is a dataset `path`: files of older versions lack some."""
        return path in self._file

    @property
    def status(self) -> NDArray[np.int8]:
        """Status of every row, int8 [rows]: 0 done, 1 error."""
        return self.column("rows/status")

    @property
    def finish_reason(self) -> NDArray[np.int8]:
        """Why every sample ended, int8 [samples]: values of `bgmpi.request.Finish`."""
        return self.column("samples/finish_reason")

    @property
    def custom_ids(self) -> list[str]:
        """The custom_id of every row."""
        whole = self.column("rows/custom_id/values").tobytes()
        cuts = self.column("rows/custom_id/offsets").tolist()
        return [whole[start:stop].decode() for start, stop in pairwise(cuts)]

    def document(self, name: str) -> str:
        """Return a text of the provenance: `config`, `chat_template`, ..."""
        return self.column(f"provenance/{name}").tobytes().decode()

    # --- single rows ----------------------------------------------------------------------------------------------

    def text(self, row: int, sample: int = 0) -> str:
        """Return what the user sees of one sample."""
        return self._piece("text/values", row, sample).tobytes().decode()

    def tokens(self, row: int, sample: int = 0) -> NDArray[np.int32]:
        """Return the generated ids of one sample, int32 [n], the stop token included."""
        return self._piece("tokens/values", row, sample)

    def row(self, row: int) -> RowResult:
        """Return one row."""
        row = self._inside(row)
        return next(iter(self._block(row, row + 1)))

    def rows(self, start: int = 0, stop: int | None = None, *, block_bytes: int = 32 << 20) -> Iterator[RowResult]:
        """Yield the rows `start` to `stop` in order; memory holds about `block_bytes` of them at once."""
        end = len(self) if stop is None else min(stop, len(self))
        for begin in range(start, end, _BLOCK_ROWS):
            span = min(begin + _BLOCK_ROWS, end)
            for low, high in cuts_by_bytes(self._bytes_before(begin, span), block_bytes):
                yield from self._block(begin + low, begin + high)

    def _piece(self, path: str, row: int, sample: int) -> Array:
        row = self._inside(row)
        count = int(self.first_sample[row + 1] - self.first_sample[row])
        if not 0 <= sample < count:
            raise IndexError(f"{self.path}: row {row} has samples 0 to {count - 1}, not {sample}")
        at = int(self.first_sample[row]) + sample
        start, stop = self.column(RAGGED[path][0], at, at + 2).tolist()
        return self.column(path, start, stop)

    def _inside(self, row: int) -> int:
        if not -len(self) <= row < len(self):
            raise IndexError(f"{self.path} has rows 0 to {len(self) - 1}, not {row}")
        return row % len(self)

    # --- blocks of rows -------------------------------------------------------------------------------------------

    def _bytes_before(self, start: int, stop: int) -> Index:
        """Return the bytes that samples take before each of the rows `start` to `stop`, int64 [stop - start + 1]."""
        first = self.first_sample[start : stop + 1]
        total = np.zeros(len(first), np.int64)
        for path, (offsets, dtype) in RAGGED.items():
            if offsets in _SAMPLE_OFFSETS and path != "logprobs/chosen":
                column = self.column(offsets, int(first[0]), int(first[-1]) + 1)
                total += (column - column[0])[first - first[0]] * dtype.itemsize
        return total

    def _table(self, fixed: tuple[str, ...], offsets: tuple[str, ...], start: int, stop: int) -> Table:
        cuts = {path: self.column(path, start, stop + 1) for path in offsets}
        values = {
            path: self.column(path, int(cuts[at][0]), int(cuts[at][-1]))
            for path, (at, _) in RAGGED.items()
            if at in cuts
        }
        columns = {path: self.column(path, start, stop) for path in fixed}
        return Table(stop - start, columns, {path: cut - cut[0] for path, cut in cuts.items()}, values)

    def _block(self, start: int, stop: int) -> Iterator[RowResult]:
        """Yield the rows `start` to `stop`, read at once."""
        first = self.first_sample[start : stop + 1]
        base = int(first[0])
        samples = self._table(_SAMPLE_FIXED, _SAMPLE_OFFSETS, base, int(first[-1]))
        row_of_sample = np.repeat(np.arange(stop - start), np.diff(first))
        names = self._table((), _ROW_OFFSETS, start, stop).take(row_of_sample)
        samples.fixed["samples/row"] = row_of_sample + start
        samples.offsets.update(names.offsets)
        samples.values.update(names.values)
        answers = to_answers(samples, self._errors(start, stop, base))
        prompts = self.column("rows/prompts", start, stop).tolist()
        cuts = (first - base).tolist()
        for row, (low, high) in enumerate(pairwise(cuts)):
            own = tuple(answers[low:high])
            error = next((answer.error for answer in own if answer.error is not None), None)
            yield RowResult(start + row, own[0].custom_id, own[0].url, own, error, prompts[row])

    def _errors(self, start: int, stop: int, base: int) -> dict[int, RowError]:
        """Return the errors of the rows `start` to `stop` by place of their sample behind sample `base`."""
        low, high = np.searchsorted(self._error_rows, [start, stop]).tolist()
        if low == high:
            return {}
        table = self._table(("errors/line",), _ERROR_OFFSETS, low, high)
        places = self.first_sample[self._error_rows[low:high]] - base + self.column("errors/sample", low, high)
        return dict(zip(places.tolist(), row_errors(table), strict=True))


def open_results(path: str | os.PathLike[str]) -> Results:
    """Open the published file `path` for reading; see `Results`."""
    return Results(path)


def _open(path: Path) -> h5py.File:
    if not path.exists():
        parts = path.with_name(path.name + ".parts")
        unfinished = f"; its job has not ended yet, {parts} is there: run it again to go on" if parts.is_dir() else ""
        raise MissingError(f"results file {path} is not there{unfinished}")
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise _cannot_open(path, error) from error


def _cannot_open(path: Path, error: OSError) -> BgmpiError:
    if error.errno in LOCKED:
        return InputError(f"{path} is locked (errno {error.errno}): {LOCK_ADVICE}")
    if not os.access(path, os.R_OK) or path.is_dir():
        return InputError(f"{path} cannot be read: {error}")
    return InputError(f"{path} is not a whole HDF5 file (cut short, or another kind of file): {error}")


def _check(path: Path, attributes: dict[str, Any]) -> None:
    if attributes.get("format") != FORMAT:
        raise InputError(
            f"{path} is HDF5 but no results of bgmpi: format is {attributes.get('format')!r}, not {FORMAT!r}"
        )
    if attributes.get("format_version", 0) > FORMAT_VERSION:
        raise InputError(
            f"{path} has format version {attributes['format_version']}, this bgmpi reads up to {FORMAT_VERSION}: "
            f"update it"
        )
    if attributes.get("complete") != 1:
        raise InputError(f"{path} is not complete: publishing it was interrupted. Run the job again to finish it")


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
