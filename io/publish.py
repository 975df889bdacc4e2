"""Merge the segments of all ranks into the one published file, in the order of the input.

Row i of the published file is the i-th request of the input, whatever rank, attempt or order finished it (design
section 7).  Before a byte is written law 5 is checked on the index of all answers: every row has all its samples once,
or is refused once; anything else is a fault of the program and nothing is published.

Memory is bounded by `block_bytes` plus some 50 bytes per answer: segments are mapped, blocks of rows are gathered and
appended.  `complete` is set last, in a file that has a temporary name until it is whole and on the disk.  Rejected: a
virtual dataset over the segments, because a missing part reads as zeros without an error.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from bgmpi.errors import InternalError
from bgmpi.io import attempts, kv_checkpoint
from bgmpi.io.attempts import RowMap
from bgmpi.io.collected import Collected, Source, collect
from bgmpi.io.columns import FINISH, FIXED, RAGGED, STATUS, Array, Index, Table, concatenate, cuts_by_bytes, empty
from bgmpi.io.durable import HdfSink, remove_if_there, replacing
from bgmpi.io.journal import PREFIX, JournalReading

FORMAT = "bgmpi-results"
FORMAT_VERSION = 1
ATTRIBUTE_LIMIT = 32 << 10  # HDF5's classic layout refuses attributes over 64 KB
_CHUNK_BYTES = 256 << 10
_NAMED = 10

_FIXED_OUT = {path: dtype for path, dtype in FIXED.items() if path.startswith("samples/") and path != "samples/row"}
_FIXED_OUT["samples/default_cap"] = np.dtype(np.bool_)
_ENUMS = {"samples/finish_reason": FINISH, "rows/status": STATUS}
_SECONDS = ("samples/queued", "samples/first_token", "samples/done")


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where the results come from.

    `attributes` adds root attributes of its own; `documents` holds texts of any size (resolved config as JSON, chat
    template, ...), each stored as UTF-8 bytes in `provenance/<name>`; `layout` is the parallel layout.
    """

    model: str
    code_version: str
    input_path: str = ""
    input_bytes: int = -1
    input_sha256: str = ""
    model_index_sha256: str = ""
    tokenizer_sha256: str = ""
    layout: Mapping[str, Any] = field(default_factory=dict)
    attributes: Mapping[str, str | int | float] = field(default_factory=dict)
    documents: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Published:
    """What was published: rows by status, samples, generated tokens, the file's size, and what the journals held that
    is not a record."""

    path: Path
    rows: int
    done: int
    errors: int
    samples: int
    tokens: int
    bytes: int
    journal: JournalReading


@dataclass(frozen=True, slots=True)
class _Order:
    """All answers in output order: segment, entry in it, row, bytes [k]; first_sample [rows + 1] cuts them in rows."""

    segments: Sequence[Source]
    segment: Index
    entry: Index
    first_sample: Index
    row: Index
    bytes: Index


def publish(
    folder: str | os.PathLike[str],
    output: str | os.PathLike[str],
    provenance: Provenance,
    n_rows: int,
    samples_per_row: NDArray[np.int32],
    *,
    prompts_per_row: NDArray[np.int32] | None = None,
    content: NDArray[np.uint64] | None = None,
    maps: Mapping[int, RowMap] | None = None,
    block_bytes: int = 32 << 20,
    beat: Callable[[], None] = lambda: None,
) -> Published:
    """Publish the answers of all segments of `folder` as `output`, replacing it only when all is written.

    samples_per_row int32 [n_rows]: sequences of each row (0 or 1 for a row refused while reading); prompts_per_row
    int32 [n_rows]: how many prompts these samples share, 1 when None; content uint64 [n_rows]: hashes of the rows
    (RequestIndex), None: left out; maps: as `collect` takes them; beat: is called after each block.  Raise
    InternalError naming rows that are missing or there twice (law 5), WriteError when `output` cannot be written.
    """
    prompts = np.ones(n_rows, np.int32) if prompts_per_row is None else np.asarray(prompts_per_row, np.int32)
    if len(samples_per_row) != n_rows or len(prompts) != n_rows:
        raise InternalError(f"{n_rows} rows, but {len(samples_per_row)} sample counts and {len(prompts)} prompt counts")
    collected = collect(Path(folder), maps)
    return publish_collected(
        collected, output, provenance, samples_per_row, prompts, content=content, block_bytes=block_bytes, beat=beat
    )


def publish_collected(
    collected: Collected,
    output: str | os.PathLike[str],
    provenance: Provenance,
    samples_per_row: NDArray[np.int32],
    prompts: NDArray[np.int32],
    *,
    content: NDArray[np.uint64] | None = None,
    block_bytes: int = 32 << 20,
    beat: Callable[[], None] = lambda: None,
) -> Published:
    """Publish answers wherever they lie; see `publish`."""
    output = Path(os.path.realpath(output))  # a link to scratch space stays a link
    n_rows = len(prompts)
    order = _in_order(collected, n_rows, np.asarray(samples_per_row, np.int64))
    _remove_stale(output)
    temporary = output.with_name(f".{output.name}.{secrets.token_hex(6)}.publishing")
    needed = int(order.bytes.sum())
    with replacing(output, temporary, needed) as path, HdfSink(path) as sink:
        done, tokens = _write(sink, provenance, order, prompts, content, block_bytes, beat)
    size = output.stat().st_size
    return Published(output, n_rows, done, n_rows - done, len(order.entry), tokens, size, collected.journal)


def remove_parts(folder: str | os.PathLike[str]) -> None:
    """Remove the segments and journals of `folder`, and the folder when nothing else is in it.

    All of it counts or nothing does: should a kill leave the half, no later attempt takes it for a job's answers.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return
    attempts.begin_removal(folder)
    # Journals first: a kill between leaves no record without its file.
    files = ("segment-*.h5", ".segment-*.tmp", "progress-*.h5", ".progress-*.tmp")
    for pattern in (f"{PREFIX}*.jsonl", *files, *kv_checkpoint.PATTERNS, *attempts.PATTERNS):
        for path in sorted(folder.glob(pattern)):
            remove_if_there(path)
    if not any(folder.iterdir()):
        folder.rmdir()


def _remove_stale(output: Path) -> None:
    for path in output.parent.glob(f".{output.name}.*.publishing"):
        remove_if_there(path)


# --- the index of all answers and law 5 ---------------------------------------------------------------------------


def _in_order(collected: Collected, n_rows: int, samples: Index) -> _Order:
    rows, numbers = collected.row, collected.sample
    order = np.lexsort((numbers, rows))
    _check_each_once(rows[order], numbers[order], n_rows, samples, collected)
    first = np.zeros(n_rows + 1, np.int64)
    np.cumsum(np.bincount(rows, minlength=n_rows), out=first[1:])
    return _Order(
        collected.segments, collected.segment[order], collected.entry[order], first, rows[order], collected.bytes[order]
    )


def _check_each_once(rows: Index, numbers: Array, n_rows: int, samples: Index, collected: Collected) -> None:
    """Raise InternalError unless every row has each of its samples once, or one entry that refuses it (law 5)."""
    faults = []
    strange = (rows < 0) | (rows >= n_rows)
    if strange.any():
        faults.append(_name_rows("answers for rows that the input does not have", rows[strange]))
        rows, numbers = rows[~strange], numbers[~strange]
    expected = np.maximum(samples, 1)
    expected[rows[numbers < 0]] = 1  # one entry stands for the whole row
    counts = np.bincount(rows, minlength=n_rows)
    same = (np.diff(rows) == 0) & (np.diff(numbers) == 0)
    twice = np.unique(np.concatenate([rows[1:][same], np.flatnonzero(counts > expected)]))
    missing = np.flatnonzero(counts < expected)
    number = numbers - (np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows])
    wrong = np.setdiff1d(rows[(number != 0) & (numbers >= 0)], np.concatenate([twice, missing]))
    named = {"rows without all their answers": missing, "rows answered twice": twice, "rows with wrong samples": wrong}
    faults += [_name_rows(what, at) for what, at in named.items() if len(at)]
    if faults:
        lost = f" Damaged segments: {'; '.join(collected.damaged)}." if collected.damaged else ""
        raise InternalError(
            f"nothing was published from {collected.journal.folder}: {'; '.join(faults)} (rows count from 0; {n_rows} "
            f"rows).{lost} The segments are kept; run again to redo missing rows."
        )


def _name_rows(what: str, rows: Sequence[int] | Index) -> str:
    named = ", ".join(str(int(row)) for row in rows[:_NAMED])
    return f"{len(rows)} {what}: {named}{', ...' if len(rows) > _NAMED else ''}"


# --- writing ------------------------------------------------------------------------------------------------------


def _write(
    sink: HdfSink,
    provenance: Provenance,
    order: _Order,
    prompts: NDArray[np.int32],
    content: NDArray[np.uint64] | None,
    block_bytes: int,
    beat: Callable[[], None],
) -> tuple[int, int]:
    """Write the whole file into `sink`; return rows done and tokens generated."""
    n_rows = len(prompts)
    try:
        with h5py.File(sink, "w") as file:
            file.attrs["complete"] = 0
            _write_provenance(file, provenance, n_rows)
            writer = _Appender(file)
            writer.append_fixed("rows/first_sample", order.first_sample)
            writer.append_fixed("rows/prompts", np.clip(prompts, 1, np.diff(order.first_sample)).astype(np.int32))
            if content is not None:
                writer.append_fixed("rows/content", np.asarray(content, np.uint64))
            done = 0
            ends = np.concatenate([[0], np.cumsum(order.bytes)])[order.first_sample]
            for start, stop in cuts_by_bytes(ends, block_bytes):
                done += _write_block(writer, order, start, stop)
                sink.check()
                beat()
            writer.finish()
            file.flush()
            sink.check()
            file.attrs["complete"] = 1
    except (OSError, RuntimeError, ValueError):
        sink.check()  # after a failed write HDF5 reads zeros back and complains of them: tell the first error
        raise
    sink.check()
    return done, writer.length("tokens/values")


def _write_provenance(file: h5py.File, provenance: Provenance, n_rows: int) -> None:
    attributes: dict[str, str | int | float] = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "creator": f"bgmpi {provenance.code_version}",
        "created_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "n_rows": n_rows,
        "input_path": provenance.input_path,
        "input_bytes": provenance.input_bytes,
        "input_sha256": provenance.input_sha256,
        "model": provenance.model,
        "model_index_sha256": provenance.model_index_sha256,
        "tokenizer_sha256": provenance.tokenizer_sha256,
        "layout": json.dumps(dict(provenance.layout), sort_keys=True),
        "code_version": provenance.code_version,
    }
    clash = sorted(set(attributes) & set(provenance.attributes))
    if clash:
        raise InternalError(f"provenance attributes {clash} are set by the format itself; rename them")
    for name, value in {**attributes, **provenance.attributes}.items():
        if isinstance(value, str) and len(value.encode()) > ATTRIBUTE_LIMIT:
            raise InternalError(f"attribute {name!r} has {len(value)} characters; pass it among the documents instead")
        file.attrs[name] = value
    for name, text in provenance.documents.items():
        data = np.frombuffer(text.encode(), np.uint8)
        dataset = file.create_dataset(f"provenance/{name}", data=data, **_storage(data.dtype, len(data)))
        dataset.attrs["encoding"] = "utf-8"


def _gather(order: _Order, start: int, stop: int) -> Table:
    """Return the answers `start` to `stop` of the output order, lifted out of their segments."""
    segment, entry = order.segment[start:stop], order.entry[start:stop]
    by_segment = np.argsort(segment, kind="stable")
    touched, begins = np.unique(segment[by_segment], return_index=True)
    groups = np.split(by_segment, begins[1:])
    tables = [
        order.segments[number].take(entry[group]) for number, group in zip(touched.tolist(), groups, strict=True)
    ]
    back = np.empty(stop - start, np.int64)
    back[by_segment] = np.arange(stop - start)
    table = concatenate(tables or [empty()]).take(back)
    table.fixed["samples/row"] = order.row[start:stop]  # as the present input numbers them
    return table


def _write_block(writer: _Appender, order: _Order, start: int, stop: int) -> int:
    """Append rows `start` to `stop`; return how many of them are done."""
    first = order.first_sample[start : stop + 1]
    table = _gather(order, int(first[0]), int(first[-1]))
    table.fixed["samples/sample"] = np.maximum(table.fixed["samples/sample"], 0)
    present = table.fixed["errors/present"] != 0
    first = first - first[0]
    failed = np.add.reduceat(present.astype(np.int64), first[:-1]) > 0
    writer.append_fixed("rows/status", np.where(failed, STATUS["error"], STATUS["done"]).astype(np.int8))
    writer.append(table.ragged(("rows/",)).take(first[:-1]))
    for path in _FIXED_OUT:
        writer.append_fixed(path, table.fixed[path].astype(_FIXED_OUT[path]))
    writer.append(table.ragged(("tokens/", "text/", "stop_text/", "prompt/", "logprobs/", "prompt_logprobs/")))
    at = np.flatnonzero(present)
    writer.append_fixed("errors/row", table.fixed["samples/row"][at])
    writer.append_fixed("errors/sample", table.fixed["samples/sample"][at])
    writer.append_fixed("errors/line", table.fixed["errors/line"][at])
    writer.append(table.ragged(("errors/",)).take(at))
    return int((~failed).sum())


def _storage(dtype: np.dtype[Any], expected: int) -> dict[str, Any]:
    """Return the storage options of a dataset: portable filters, chunks of 256 KiB, growable."""
    chunk = max(1, min(expected, _CHUNK_BYTES // dtype.itemsize))
    return {
        "chunks": (chunk,),
        "maxshape": (None,),
        "shuffle": True,
        "compression": "gzip",
        "compression_opts": 4,
        "fletcher32": True,
    }


class _Appender:
    """Appends to growing datasets in whole chunks.

    What does not fill a chunk waits in memory, at most one chunk a dataset, so no chunk is ever compressed twice.
    """

    def __init__(self, file: h5py.File) -> None:
        self._file = file
        self._waiting: dict[str, list[Array]] = {}
        self._lengths: dict[str, int] = {}
        self._ends: dict[str, int] = {}

    def length(self, path: str) -> int:
        """Return how many values `path` got."""
        return self._lengths.get(path, 0)

    def append(self, table: Table) -> None:
        """Append ragged columns: values as they are, offsets moved behind those that are there."""
        for path, offsets in table.offsets.items():
            end = self._ends.get(path)
            if end is None:
                self.append_fixed(path, offsets)
            else:
                self.append_fixed(path, offsets[1:] + end)
            self._ends[path] = (end or 0) + int(offsets[-1])
        for path, values in table.values.items():
            self.append_fixed(path, values)

    def append_fixed(self, path: str, column: Array) -> None:
        """Append a plain column."""
        waiting = self._waiting.setdefault(path, [])
        waiting.append(column)
        self._lengths[path] = self._lengths.get(path, 0) + len(column)
        chunk = _CHUNK_BYTES // column.dtype.itemsize
        held = sum(len(piece) for piece in waiting)
        if held >= chunk:
            joined = np.concatenate(waiting)
            whole = held - held % chunk
            self._put(path, joined[:whole])
            self._waiting[path] = [joined[whole:].copy()]

    def finish(self) -> None:
        """Write what waits, and give every column of the format its dataset even when it is empty."""
        if not self._ends:
            self.append(empty().ragged(("",)))
        for path, dtype in _EMPTY.items():
            self._waiting.setdefault(path, [np.empty(0, dtype)])
        for path, waiting in self._waiting.items():
            self._put(path, np.concatenate(waiting))
        self._waiting.clear()

    def _put(self, path: str, column: Array) -> None:
        if path not in self._file:
            self._create(path, column)
        dataset = self._file[path]
        start = dataset.shape[0]
        dataset.resize((start + len(column),))
        if len(column):
            dataset[start:] = column

    def _create(self, path: str, column: Array) -> None:
        enum = _ENUMS.get(path)
        dtype = h5py.enum_dtype(enum, basetype=column.dtype) if enum else column.dtype
        dataset = self._file.create_dataset(path, (0,), dtype, **_storage(column.dtype, len(column)))
        if path in _SECONDS:
            dataset.attrs["units"] = "s"
        if path in RAGGED:
            dataset.attrs["offsets"] = f"/{RAGGED[path][0]}"
            if column.dtype == np.uint8:
                dataset.attrs["encoding"] = "utf-8"


#: columns that get a dataset even when the job has no row.
_EMPTY: dict[str, np.dtype[Any]] = {
    **_FIXED_OUT,
    "rows/status": np.dtype(np.int8),
    "errors/row": np.dtype(np.int64),
    "errors/sample": np.dtype(np.int32),
    "errors/line": np.dtype(np.int64),
}
