"""Many answers as columns: the one form in which results are buffered, stored, merged and read.

A column's name is its path in an HDF5 file, so a segment, the published file and this table speak of the same things.
There are two kinds: a fixed column has one number per entry; a ragged column has `values` and shares an `offsets`
column, int64 [entries + 1], with all ragged columns of the same lengths.  No variable-length strings (conventions):
text is UTF-8 bytes.

In a segment all columns have one entry per answer.  The published file has `rows/` columns per row, `errors/` columns
per error and all others per answer; `docs/results.md` is the table for users.

Work per answer happens only where answer objects begin or end (`from_answers`, `to_answers`); everything between is
whole arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bgmpi.errors import InternalError, RowError
from bgmpi.request import Answer, Finish, Logprobs

Array = NDArray[Any]
Index = NDArray[np.int64]

STATUS = {"done": 0, "error": 1}
FINISH = {finish.name.lower(): int(finish) for finish in Finish if finish is not Finish.UNFINISHED}

#: fixed columns: path -> dtype.
FIXED: dict[str, np.dtype[Any]] = {
    "samples/row": np.dtype(np.int64),
    "samples/sample": np.dtype(np.int32),
    "samples/finish_reason": np.dtype(np.int8),
    "samples/prompt_tokens": np.dtype(np.int32),
    "samples/completion_tokens": np.dtype(np.int32),
    "samples/stop_token_id": np.dtype(np.int32),
    "samples/top_logprobs": np.dtype(np.int32),
    "samples/prompt_top_logprobs": np.dtype(np.int32),
    "samples/default_cap": np.dtype(np.int8),
    "samples/queued": np.dtype(np.float64),
    "samples/first_token": np.dtype(np.float64),
    "samples/done": np.dtype(np.float64),
    "errors/present": np.dtype(np.int8),
    "errors/line": np.dtype(np.int64),
}

_INT, _FLOAT, _BYTES = np.dtype(np.int32), np.dtype(np.float32), np.dtype(np.uint8)

#: ragged columns: path of the values -> (path of the offsets, dtype of the values).
RAGGED: dict[str, tuple[str, np.dtype[Any]]] = {
    "tokens/values": ("tokens/offsets", _INT),
    "text/values": ("text/offsets", _BYTES),
    "stop_text/values": ("stop_text/offsets", _BYTES),
    "prompt/values": ("prompt/offsets", _INT),
    "logprobs/chosen": ("tokens/offsets", _FLOAT),
    "logprobs/top_ids": ("logprobs/top_offsets", _INT),
    "logprobs/top_values": ("logprobs/top_offsets", _FLOAT),
    "prompt_logprobs/chosen": ("prompt_logprobs/offsets", _FLOAT),
    "prompt_logprobs/top_ids": ("prompt_logprobs/top_offsets", _INT),
    "prompt_logprobs/top_values": ("prompt_logprobs/top_offsets", _FLOAT),
    "rows/custom_id/values": ("rows/custom_id/offsets", _BYTES),
    "rows/url/values": ("rows/url/offsets", _BYTES),
    "errors/code/values": ("errors/code/offsets", _BYTES),
    "errors/message/values": ("errors/message/offsets", _BYTES),
    "errors/param/values": ("errors/param/offsets", _BYTES),
}

OFFSETS: tuple[str, ...] = tuple(dict.fromkeys(offsets for offsets, _ in RAGGED.values()))

#: bytes of one value in all columns that share an offsets column.
_VALUE_BYTES = {at: sum(dtype.itemsize for path, dtype in RAGGED.values() if path == at) for at in OFFSETS}

DTYPES: dict[str, np.dtype[Any]] = {
    **FIXED,
    **dict.fromkeys(OFFSETS, np.dtype(np.int64)),
    **{path: dtype for path, (_, dtype) in RAGGED.items()},
}

#: times are kept to the microsecond (2**-20 s), so that their empty low bits compress.
TIME_STEP = 2.0**-20


@dataclass(frozen=True, slots=True)
class Table:
    """Columns of `entries` entries.  fixed: path -> [entries]; offsets: path -> int64 [entries + 1], from 0; values:
    path of a ragged column -> [offsets[-1]]."""

    entries: int
    fixed: dict[str, Array]
    offsets: dict[str, Index]
    values: dict[str, Array]

    def ragged(self, prefixes: tuple[str, ...]) -> Table:
        """Return the ragged columns alone whose paths begin with one of `prefixes`."""
        return Table(
            self.entries,
            {},
            {path: column for path, column in self.offsets.items() if path.startswith(prefixes)},
            {path: column for path, column in self.values.items() if path.startswith(prefixes)},
        )

    def take(self, index: Index) -> Table:
        """Return the entries `index` int64 [k], in that order."""
        fixed = {path: column[index] for path, column in self.fixed.items()}
        offsets = {path: _offsets(column[index + 1] - column[index]) for path, column in self.offsets.items()}
        values = {}
        for path, column in self.values.items():
            at = RAGGED[path][0]
            values[path] = _take_ragged(column, self.offsets[at][index], offsets[at])
        return Table(len(index), fixed, offsets, values)

    def columns(self) -> dict[str, Array]:
        """Return every column by path."""
        return {**self.fixed, **self.offsets, **self.values}


def entry_bytes(table: Table) -> Index:
    """Return the bytes each entry takes with all its columns, int64 [entries]; only offsets are looked at."""
    total = np.full(table.entries, sum(dtype.itemsize for dtype in FIXED.values()) + 8 * len(OFFSETS), np.int64)
    for path in OFFSETS:
        total += np.diff(table.offsets[path]) * _VALUE_BYTES[path]
    return total


def cuts_by_bytes(ends: Index, block_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield ranges (start, stop) of rows of about `block_bytes`, each at least one row long.

    ends int64 [rows + 1]: bytes before each row, and all bytes last.
    """
    rows = len(ends) - 1
    start = 0
    while start < rows:
        stop = int(np.searchsorted(ends, ends[start] + block_bytes, side="right")) - 1
        stop = min(max(stop, start + 1), rows)
        yield start, stop
        start = stop


def concatenate(tables: Sequence[Table]) -> Table:
    """Return the entries of all `tables` (at least one, with the same columns) one after another."""
    first = tables[0]
    if len(tables) == 1:
        return first
    return Table(
        sum(table.entries for table in tables),
        {path: np.concatenate([table.fixed[path] for table in tables]) for path in first.fixed},
        {path: _offsets(np.concatenate([np.diff(t.offsets[path]) for t in tables])) for path in first.offsets},
        {path: np.concatenate([table.values[path] for table in tables]) for path in first.values},
    )


def spread_out(table: Table, place: Index, entries: int) -> Table:
    """Return a table of `entries` entries whose ragged columns are those of `table`, its i-th entry at place[i] (int64,
    ascending) and nothing elsewhere."""
    offsets = {}
    for path, cuts in table.offsets.items():
        lengths = np.zeros(entries, np.int64)
        lengths[place] = np.diff(cuts)
        offsets[path] = _offsets(lengths)
    return Table(entries, {}, offsets, table.values)


def _offsets(lengths: Any) -> Index:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _take_ragged(values: Array, starts: Index, offsets: Index) -> Array:
    """Gather [offsets[-1]] values: entry i comes from `starts[i]` on and is offsets[i + 1] - offsets[i] long."""
    total = int(offsets[-1])
    if not total:
        return np.empty(0, values.dtype)
    lengths = np.diff(offsets)
    if np.array_equal(starts, starts[0] + offsets[:-1]):
        return values[starts[0] : starts[0] + total]
    if total > 4096 * len(lengths):  # few long entries: one copy each beats an index of eight bytes per value
        pieces = zip(starts.tolist(), lengths.tolist(), strict=True)
        return np.concatenate([values[start : start + length] for start, length in pieces])
    return values[np.arange(total) + np.repeat(starts - offsets[:-1], lengths)]


def empty() -> Table:
    """Return a table of no entries with every column."""
    return from_answers([])


def from_answers(answers: Sequence[Answer]) -> Table:
    """Return one entry per answer, in order; an error's whole-row mark (sample -1) is kept."""
    errors = [answer.error or _NO_ERROR for answer in answers]
    stops = [answer.stop_reason for answer in answers]
    tokens = [np.asarray(answer.tokens, np.int32) for answer in answers]
    fixed_lists: dict[str, list[Any]] = {
        "samples/row": [answer.row for answer in answers],
        "samples/sample": [answer.sample for answer in answers],
        "samples/finish_reason": [answer.finish for answer in answers],
        "samples/prompt_tokens": [answer.prompt_tokens for answer in answers],
        "samples/completion_tokens": [len(ids) for ids in tokens],
        "samples/stop_token_id": [stop if isinstance(stop, int) else -1 for stop in stops],
        "samples/top_logprobs": [_width(answer.logprobs) for answer in answers],
        "samples/prompt_top_logprobs": [_width(answer.prompt_logprobs) for answer in answers],
        "samples/default_cap": [answer.default_cap for answer in answers],
        "samples/queued": [answer.queued_s for answer in answers],
        "samples/first_token": [answer.first_token_s for answer in answers],
        "samples/done": [answer.done_s for answer in answers],
        "errors/present": [answer.error is not None for answer in answers],
        "errors/line": [error.line for error in errors],
    }
    ragged: dict[str, list[Array]] = {"tokens/values": tokens, "prompt/values": [answer.prompt for answer in answers]}
    ragged |= _logprob_columns([answer.logprobs for answer in answers], "logprobs", [len(ids) for ids in tokens])
    ragged |= _logprob_columns([answer.prompt_logprobs for answer in answers], "prompt_logprobs", [0] * len(answers))
    texts: dict[str, list[str]] = {
        "text/values": [answer.text for answer in answers],
        "stop_text/values": [stop if isinstance(stop, str) else "" for stop in stops],
        "rows/custom_id/values": [answer.custom_id for answer in answers],
        "rows/url/values": [answer.url for answer in answers],
        "errors/code/values": [error.code for error in errors],
        "errors/message/values": [error.message for error in errors],
        "errors/param/values": [error.param or "" for error in errors],
    }
    fixed = {path: np.array(column, FIXED[path]) for path, column in fixed_lists.items()}
    for path in ("samples/queued", "samples/first_token", "samples/done"):
        fixed[path] = np.round(fixed[path] / TIME_STEP) * TIME_STEP
    offsets: dict[str, Index] = {}
    values: dict[str, Array] = {}
    for path, (at, dtype) in RAGGED.items():
        if path in texts:
            encoded = [_utf8(text) for text in texts[path]]
            values[path] = np.frombuffer(b"".join(encoded), np.uint8)
            lengths = [len(text) for text in encoded]
        else:
            pieces = [np.asarray(piece, dtype).reshape(-1) for piece in ragged[path]]
            values[path] = np.concatenate(pieces) if pieces else np.empty(0, dtype)
            lengths = [len(piece) for piece in pieces]
        cuts = _offsets(lengths)
        if at in offsets and not np.array_equal(offsets[at], cuts):
            raise InternalError(_misfit(path, answers, np.diff(offsets[at]), np.diff(cuts)))
        offsets[at] = cuts
    return Table(len(answers), fixed, offsets, values)


def _misfit(path: str, answers: Sequence[Answer], expected: Index, got: Index) -> str:
    first = int(np.flatnonzero(expected != got)[0])
    answer = answers[first]
    return (
        f"row {answer.row} sample {answer.sample}: {path} has {got[first]} values, expected {expected[first]} as "
        f"in the columns that share {RAGGED[path][0]}"
    )


_NO_ERROR = RowError("", "")


def _width(logprobs: Logprobs | None) -> int:
    return -1 if logprobs is None else int(np.asarray(logprobs.top_ids).shape[-1])


def _logprob_columns(all_logprobs: list[Logprobs | None], group: str, lengths: list[int]) -> dict[str, list[Array]]:
    """Return the three columns of `group`; where nothing was asked `chosen` is `lengths[i]` times NaN."""
    nothing = np.empty(0, np.int32)
    return {
        f"{group}/chosen": [
            np.full(length, np.nan, np.float32) if one is None else one.chosen
            for one, length in zip(all_logprobs, lengths, strict=True)
        ],
        f"{group}/top_ids": [nothing if one is None else one.top_ids for one in all_logprobs],
        f"{group}/top_values": [nothing if one is None else one.top for one in all_logprobs],
    }


def _utf8(text: str) -> bytes:
    """Encode strictly; half a surrogate pair, which UTF-8 cannot say, becomes U+FFFD (case C09)."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()


def texts(table: Table, path: str) -> list[str]:
    """Return the texts of all entries of the ragged column `path`."""
    whole = table.values[path].tobytes()
    cuts = table.offsets[RAGGED[path][0]].tolist()
    return [whole[start:stop].decode() for start, stop in pairwise(cuts)]


def to_answers(table: Table, errors: dict[int, RowError]) -> list[Answer]:
    """Return one Answer per entry; `errors` holds the error of each entry that has one.

    Arrays are copies.  `custom_id` and `url` must be columns with one entry per answer.
    """
    text = {path: texts(table, path) for path, (_, dtype) in RAGGED.items() if dtype == _BYTES and path in table.values}
    number = {path: column.tolist() for path, column in table.fixed.items()}
    cuts = {path: column.tolist() for path, column in table.offsets.items()}

    def piece(path: str, entry: int) -> Array:
        at = cuts[RAGGED[path][0]]
        return table.values[path][at[entry] : at[entry + 1]].copy()

    def logprobs(group: str, width: int, entry: int) -> Logprobs | None:
        if width < 0:
            return None
        chosen = piece(f"{group}/chosen", entry)
        shape = (len(chosen), width)
        ids, top = piece(f"{group}/top_ids", entry), piece(f"{group}/top_values", entry)
        return Logprobs(chosen, ids.reshape(shape), top.reshape(shape))

    return [
        Answer(
            row=number["samples/row"][i],
            sample=number["samples/sample"][i],
            custom_id=text["rows/custom_id/values"][i],
            finish=Finish(number["samples/finish_reason"][i]),
            prompt_tokens=number["samples/prompt_tokens"][i],
            tokens=piece("tokens/values", i),
            text=text["text/values"][i],
            stop_reason=_stop_reason(number["samples/stop_token_id"][i], text["stop_text/values"][i]),
            error=errors.get(i),
            logprobs=logprobs("logprobs", number["samples/top_logprobs"][i], i),
            prompt_logprobs=logprobs("prompt_logprobs", number["samples/prompt_top_logprobs"][i], i),
            prompt=piece("prompt/values", i),
            url=text["rows/url/values"][i],
            default_cap=bool(number["samples/default_cap"][i]),
            queued_s=number["samples/queued"][i],
            first_token_s=number["samples/first_token"][i],
            done_s=number["samples/done"][i],
        )
        for i in range(table.entries)
    ]


def _stop_reason(token_id: int, text: str) -> str | int | None:
    if text:
        return text
    return token_id if token_id >= 0 else None


def row_errors(table: Table) -> list[RowError]:
    """Return the error of every entry of a table of `errors/` columns."""
    columns = (texts(table, f"errors/{name}/values") for name in ("code", "message", "param"))
    lines = table.fixed["errors/line"].tolist()
    rows = zip(*columns, lines, strict=True)
    return [RowError(code, message, param or None, line) for code, message, param, line in rows]
