"""The append-only list of valid segments: a segment that no journal names does not exist.

Each writer (one rank of one attempt) owns one journal file that it alone creates and appends to, so no lock is needed,
a resumed run never appends to a file that a kill may have torn, and a torn last line can never swallow the next record
(the fault of PyTables-style and JSONL journals).  One line is one JSON object; a line counts only with its newline.

What a line says is not believed: a name must be one that a writer could have made, the bytes must have their hash, and
a file that is named twice (a journal copied by hand) counts once.

Beside the segments of finished answers a journal names how far the unfinished ones were: of those files the last
`PROGRESS_KEPT` count, and a writer removes the others.  One would not do: a sequence that moved to another rank is in
no file of its old rank any more, and in none of its new one yet.  Ranks save at the ends of the same rounds, each when
its own interval is over, so the new rank has saved it before its old one has saved thrice.

The journal knows names, sizes and hashes of files and nothing of what is inside them.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from bgmpi.io.durable import sync_folder, write_all, write_failed

PREFIX = "journal-"
SEGMENT: Final = "segment"
PROGRESS: Final = "progress"
#: How many of a journal's progress files count.
PROGRESS_KEPT: Final = 3
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")


class Entry(msgspec.Struct, frozen=True):
    """One valid file.  name: in the folder; records: answers inside; bytes, sha256: of the file; kind: segment, or
    progress of unfinished answers; seconds: of the job when it was written."""

    name: str
    records: int
    bytes: int
    sha256: str
    kind: Literal["segment", "progress"] = SEGMENT
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class JournalReading:
    """What the journals of a folder name.

    entries: segments that are there and whole, in order of writing within a journal; progress: the last ones of each
    journal, where they are whole.  damaged: one sentence for each named file that is missing or changed.  torn: one
    sentence for each line that is no record.
    """

    folder: Path
    entries: tuple[Entry, ...]
    progress: tuple[Entry, ...]
    damaged: tuple[str, ...]
    torn: tuple[str, ...]


class JournalWriter:
    """Appends records to one new journal file; each append is on the disk when it returns."""

    def __init__(self, path: Path) -> None:
        """Create `path`, which must not exist; raise WriteError."""
        self.path = path
        try:
            self._file = open(path, "xb", buffering=0)  # noqa: SIM115 (closed by close)
            sync_folder(path.parent)
        except OSError as error:
            raise write_failed(path, error, 0) from error
        self._good = 0

    def append(self, entry: Entry) -> None:
        """Add one record; raise WriteError, after which the same journal can be appended to again."""
        line = msgspec.json.encode(entry) + b"\n"
        try:
            if os.fstat(self._file.fileno()).st_size != self._good:
                os.ftruncate(self._file.fileno(), self._good)
            self._file.seek(self._good)
            write_all(self._file, line)
            os.fsync(self._file.fileno())
        except OSError as error:
            raise write_failed(self.path, error, len(line)) from error
        self._good += len(line)

    def close(self) -> None:
        """Close the file; what was appended is on the disk already."""
        self._file.close()


def read_journal(folder: str | os.PathLike[str], *, verify: bool = True) -> JournalReading:
    """Read every journal of `folder` (a missing folder names nothing).

    With `verify` each segment is hashed; without, only its presence and size are checked.
    """
    folder = Path(folder)
    found: dict[str, list[Entry]] = {SEGMENT: [], PROGRESS: []}
    damaged: list[str] = []
    torn: list[str] = []
    taken: set[str] = set()
    for path in sorted(folder.glob(f"{PREFIX}*.jsonl")):
        lines = _read_lines(path, torn)
        last = [one for one in lines if one.kind == PROGRESS][-PROGRESS_KEPT:]
        for entry in [*(one for one in lines if one.kind == SEGMENT), *last]:
            fault = "named a second time" if entry.name in taken else _fault(folder, entry, verify)
            if fault:
                damaged.append(f"{entry.name} ({entry.records} answers, named by {path.name}): {fault}")
            else:
                taken.add(entry.name)
                found[entry.kind].append(entry)
    return JournalReading(folder, tuple(found[SEGMENT]), tuple(found[PROGRESS]), tuple(damaged), tuple(torn))


def _read_lines(path: Path, torn: list[str]) -> list[Entry]:
    try:
        lines = read_plain(path).split(b"\n")
    except OSError as error:
        torn.append(f"{path.name} cannot be read, what it names does not count: {error}")
        return []
    entries = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            entries.append(msgspec.json.decode(line, type=Entry))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            torn.append(f"{path.name} line {number} is no record and was ignored: {line[:80]!r}")
    if lines[-1]:
        torn.append(f"{path.name} line {len(lines)} has no end and was ignored: {lines[-1][:80]!r}")
    return entries


def _fault(folder: Path, entry: Entry, verify: bool) -> str | None:
    if not _NAME.fullmatch(entry.name):
        return "no name that a writer gives"
    path = folder / entry.name
    try:
        if path.is_symlink() or not path.is_file():
            return "a link" if path.is_symlink() else "missing"
        size = path.stat().st_size
        if size != entry.bytes:
            return f"has {size} bytes, {entry.bytes} were written"
        if verify and file_sha256(path) != entry.sha256:
            return "its bytes changed since they were written (sha256 differs)"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None


def read_plain(path: Path) -> bytes:
    """Return the bytes of a file; raise OSError, also for what is there and no file (a pipe would be waited for)."""
    if not path.is_file():
        raise FileNotFoundError(f"{path.name} is no file")
    return path.read_bytes()


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hex."""
    with open(path, "rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()
