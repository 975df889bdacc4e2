"""Immutable segments: what a rank has finished, in plain HDF5 files that are whole from the moment they have a name.

A `SegmentWriter` buffers answers and turns them into one segment at a time: the file is built in memory, written to a
temporary name, fsynced, renamed, the folder fsynced, and only then named in the rank's journal (design section 7).  A
kill at any instant loses the buffer and nothing else.  What unfinished sequences have so far is written in the same
way (`save_progress`), a few files a rank, the newest in place of the oldest.  No MPI here, no lock, no file that is
opened twice for writing: rejected were parallel HDF5 (needs its own build, hangs on empty ranks) and appending to one
file (a kill tears it).

Segments are stored plainly (no compression), so that publishing can map them into memory and lift single answers out
of thousands of segments while the page cache decides what stays; the published file is the compressed one.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Literal

import h5py
import numpy as np

from bgmpi.errors import InternalError, WriteError
from bgmpi.io.columns import DTYPES, FIXED, OFFSETS, RAGGED, Array, Index, Table, from_answers
from bgmpi.io.durable import make_folder, remove_if_there, write_durably
from bgmpi.io.journal import PREFIX, PROGRESS, PROGRESS_KEPT, SEGMENT, Entry, JournalWriter
from bgmpi.request import Answer, Finish

SEGMENT_FORMAT = "bgmpi-segment"
SEGMENT_VERSION = 1
#: Columns that collecting needs: the offsets of the others, last, tell how much an answer takes.
NUMBERS = ("samples/row", "samples/sample", "errors/present", *OFFSETS)


def parts_folder(output: str | os.PathLike[str]) -> Path:
    """Return the folder beside `output` that holds its segments and journals until it is published."""
    path = Path(output)
    return path.with_name(path.name + ".parts")


class SegmentWriter:
    """Writes one rank's finished answers as segments of `folder`.

    Not thread-safe.  After a WriteError the buffer still holds its answers, so `flush` can be tried again.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        rank: int,
        *,
        attempt: int = 1,
        segment_bytes: int = 16 << 20,
        segment_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create `folder` if need be and this writer's own journal in it; raise WriteError.

        attempt: which try of the job this is, from 1; a name tells it (`attempt_of`).  A segment is due when its
        answers take `segment_bytes` or the oldest has waited `segment_seconds` of `clock`.
        """
        self.folder = Path(folder)
        self.attempt = attempt
        # The token: should two processes take themselves for the same attempt, their files never meet.
        self._name = f"{attempt:04d}-{secrets.token_hex(6)}-r{rank:05d}"
        self._segment_bytes = segment_bytes
        self._segment_seconds = segment_seconds
        self._clock = clock
        self._buffer: list[Answer] = []
        self._buffered_bytes = 0
        self._oldest = 0.0
        self._written = 0
        self._progress: list[Path] = []
        make_folder(self.folder)
        self._journal = JournalWriter(self.folder / f"{PREFIX}{self._name}.jsonl")

    def add(self, answer: Answer) -> None:
        """Buffer one answer.  `sample` -1 with an error means that the whole row was refused."""
        if (answer.finish is Finish.ERROR) != (answer.error is not None) or answer.row < 0:
            raise InternalError(
                f"row {answer.row} sample {answer.sample}: finish {answer.finish!r}, error {answer.error}"
            )
        if answer.sample < 0 and answer.error is None:
            raise InternalError(f"row {answer.row}: only an error may stand for a whole row")
        if not self._buffer:
            self._oldest = self._clock()
        self._buffer.append(answer)
        self._buffered_bytes += _size(answer)

    @property
    def buffered(self) -> int:
        """How many answers no segment holds yet."""
        return len(self._buffer)

    @property
    def due(self) -> bool:
        """Whether the buffer is big enough, or its oldest answer old enough, for a segment."""
        if not self._buffer:
            return False
        return self._buffered_bytes >= self._segment_bytes or self._clock() - self._oldest >= self._segment_seconds

    def flush_if_due(self) -> bool:
        """Flush when a segment is due; return whether it was."""
        if not self.due:
            return False
        self.flush()
        return True

    def flush(self) -> Entry | None:
        """Write the buffer as one segment and name it in the journal; return its entry, None for an empty buffer.

        When this returns the answers survive any kill.  Raise WriteError and keep the buffer otherwise.
        """
        if not self._buffer:
            return None
        entry = self.write(from_answers(self._buffer))
        self._buffer.clear()
        self._buffered_bytes = 0
        return entry

    def write(self, table: Table) -> Entry:
        """Write answers that are columns already as one segment, past the buffer; raise WriteError."""
        return self._write("segment", SEGMENT, table)

    def save_progress(self, unfinished: list[Answer]) -> None:
        """Write what unfinished sequences have so far, and remove what no longer counts (`PROGRESS_KEPT`); raise
        WriteError.

        Call it with no buffered answers: an answer and its own progress would both be there.
        """
        if not unfinished and not self._progress:
            return
        entry = self._write("progress", PROGRESS, from_answers(unfinished))
        self._progress.append(self.folder / entry.name)
        while len(self._progress) > PROGRESS_KEPT:
            remove_if_there(self._progress.pop(0))

    def _write(self, word: str, kind: Literal["segment", "progress"], table: Table) -> Entry:
        image = segment_image(table)
        name = f"{word}-{self._name}-{self._written:06d}.h5"
        self._written += 1
        write_durably(self.folder / name, image)
        sha256 = hashlib.sha256(image).hexdigest()
        entry = Entry(name, table.entries, len(image), sha256, kind, self._clock())
        self._journal.append(entry)
        return entry

    def close(self) -> None:
        """Flush and close the journal."""
        try:
            self.flush()
        finally:
            self._journal.close()

    def __enter__(self) -> SegmentWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Save what is buffered also when the block failed, unless it failed because nothing can be written."""
        if isinstance(error, WriteError):
            self._journal.close()
        else:
            self.close()


def _size(answer: Answer) -> int:
    """Estimate the bytes that an answer takes in a segment."""
    size = 256 + answer.tokens.nbytes * 2 + len(answer.text) + answer.prompt.nbytes
    for logprobs in (answer.logprobs, answer.prompt_logprobs):
        if logprobs is not None:
            size += logprobs.chosen.nbytes + logprobs.top_ids.nbytes + logprobs.top.nbytes
    return size


def segment_image(table: Table) -> bytes:
    """Return the bytes of an HDF5 file with every column of `table` (one entry per answer), stored plainly.

    Columns are made through HDF5's own calls: there are some forty, and h5py's comfortable ones cost four times more.
    """
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    with h5py.File(
        "segment", "w", driver="core", backing_store=False, alignment_threshold=1, alignment_interval=8
    ) as file:
        file.attrs["format"] = SEGMENT_FORMAT
        file.attrs["format_version"] = SEGMENT_VERSION
        file.attrs["records"] = table.entries
        for path, column in table.columns().items():
            kind, space = h5py.h5t.py_create(column.dtype), h5py.h5s.create_simple(column.shape)
            dataset = h5py.h5d.create(file.id, path.encode(), kind, space, lcpl=links)
            if column.size:
                dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, np.ascontiguousarray(column))
        file.flush()
        return bytes(file.id.get_file_image())


#: What HDF5 and numpy say of files that are none of ours.
_UNREADABLE = (OSError, KeyError, ValueError, TypeError, OverflowError, RuntimeError)


class Segment:
    """One whole segment (the journal says which are), read through a memory map.

    Only the places of its columns are kept; each `table()` maps the file anew and the map lives as long as its columns,
    so thousands of segments need neither memory nor open files.  Finding a place costs more than reading a number, so
    most columns are found when they are first asked for.
    """

    def __init__(self, path: Path) -> None:
        """Find the columns of numbers of `path`; raise InternalError when it is not a segment of this version."""
        self.path = path
        self._places: dict[str, tuple[int | None, tuple[int, ...]]] = {}
        try:
            with h5py.File(path, "r", locking=False) as file:
                found = (file.attrs.get("format"), file.attrs.get("format_version"))
                if found != (SEGMENT_FORMAT, SEGMENT_VERSION):
                    raise InternalError(
                        f"{path}: expected {SEGMENT_FORMAT} {SEGMENT_VERSION}, got {found[0]} {found[1]}"
                    )
                self.entries = int(file.attrs["records"])
                self._find(file, NUMBERS)
        except _UNREADABLE as error:
            raise self._damaged(error) from error

    def numbers(self) -> Table:
        """Map the columns `NUMBERS` alone: whose answers they are, and how much each takes.  Raises InternalError where
        they do not fit together."""
        try:
            return self._mapped(NUMBERS[: -len(OFFSETS)], OFFSETS, ())
        except _UNREADABLE as error:
            raise self._damaged(error) from error

    def table(self) -> Table:
        """Map every column; an answer costs memory when it is touched.  Raises InternalError where they do not fit
        together."""
        names = (*FIXED, *OFFSETS, *RAGGED)
        try:
            if len(self._places) < len(names):
                with h5py.File(self.path, "r", locking=False) as file:
                    self._find(file, names)
            return self._mapped(FIXED, OFFSETS, RAGGED)
        except _UNREADABLE as error:
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> InternalError:
        return InternalError(f"segment {self.path} cannot be read: {error}")

    def _find(self, file: h5py.File, names: Iterable[str]) -> None:
        self._places |= {name: _place(file, name) for name in names if name not in self._places}

    def _mapped(self, fixed: Iterable[str], offsets: Iterable[str], ragged: Iterable[str]) -> Table:
        with open(self.path, "rb") as source:
            mapped = mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ)

        def columns(names: Iterable[str]) -> dict[str, Array]:
            return {name: self._column(mapped, name) for name in names}

        table = Table(self.entries, columns(fixed), columns(offsets), columns(ragged))
        _check(table)
        return table

    def take(self, entry: Index) -> Table:
        """Return the entries `entry` int64 [k], in that order."""
        return self.table().take(entry)

    def _column(self, mapped: mmap.mmap, name: str) -> Array:
        offset, shape = self._places[name]
        dtype = DTYPES[name]
        if offset is None:  # HDF5 gives an empty column no place
            return np.zeros(shape, dtype)
        return np.ndarray(shape, dtype, buffer=mapped, offset=offset)


def _check(table: Table) -> None:
    """Raise ValueError unless every column has the length that the others promise; reads offsets alone."""
    for name, column in table.fixed.items():
        if len(column) != table.entries:
            raise ValueError(f"{name} has {len(column)} entries, expected {table.entries}")
    for name, offsets in table.offsets.items():
        if len(offsets) != table.entries + 1 or offsets[0] or (np.diff(offsets) < 0).any():
            raise ValueError(f"{name} does not cut its values into {table.entries} entries")
    for name, values in table.values.items():
        if len(values) != table.offsets[RAGGED[name][0]][-1]:
            raise ValueError(f"{name} has {len(values)} values, expected {table.offsets[RAGGED[name][0]][-1]}")


def _place(file: h5py.File, name: str) -> tuple[int | None, tuple[int, ...]]:
    dataset = h5py.h5d.open(file.id, name.encode())
    place, shape = dataset.get_offset(), dataset.shape
    if dataset.dtype != DTYPES[name] or len(shape) != 1 or (place is None and shape[0]):
        raise ValueError(f"{name} of {dataset.dtype} {list(shape)} is not stored plainly as {DTYPES[name]}")
    return place, shape


def attempt_of(name: str) -> int:
    """Return the attempt that wrote a file of this name, 0 when it cannot be told."""
    found = re.match(r"(?:segment|progress|kv)-(\d+)-", name)
    return int(found[1]) if found else 0
