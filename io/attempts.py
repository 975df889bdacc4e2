"""The attempts of one job: with which settings and which input each ran, so that a later one can go on.

Every attempt leaves a manifest in the folder of parts before it writes anything else there, and, once for each distinct
input, the content hashes of its rows.  An answer in a segment carries the row number of its attempt's input; through
the hashes a later attempt finds the row in its own input, be it edited, longer or in another order (case C70).  While
the input is unchanged nothing is looked up.

Only the files of an attempt whose manifest is there count; what is missing or damaged costs the answers that depend on
it, never the job.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path

import h5py
import msgspec
import numpy as np
from numpy.typing import NDArray

from bgmpi.errors import UsageError
from bgmpi.io.durable import make_folder, write_durably, write_failed

Rows = NDArray[np.int64]
Contents = NDArray[np.uint64]
GONE = -1
_MANIFEST = "attempt-{:04d}.json"
_ROWS = "rows-{}.h5"
_NUMBERED = re.compile(r"\.?(?:attempt|journal|segment|progress)-(\d+)")
LOCK = "lock"
#: While this file is in a folder nothing else there counts: it is being removed.
VOID = "void"
#: Everything that this room writes, as patterns.
PATTERNS = ("attempt-*.json", ".attempt-*.tmp", "rows-*.h5", ".rows-*.tmp", LOCK)


class Attempt(msgspec.Struct, frozen=True):
    """What one attempt ran with.

    number: from 1; settings: all that answers depend on, as text; input_sha256, rows: of its input; retry_failed: error
    answers of earlier attempts no longer count; begun_utc: ISO 8601.
    """

    number: int
    settings: dict[str, str]
    input_sha256: str
    rows: int
    retry_failed: bool = False
    begun_utc: str = ""


@dataclass(frozen=True, slots=True)
class RowMap:
    """How answers of an attempt count now.  rows: int64 [rows of its input], the row of the present input or GONE;
    None when it is the same input.  errors: whether its error answers count."""

    rows: Rows | None = None
    errors: bool = True


def read_attempts(folder: Path) -> tuple[tuple[Attempt, ...], tuple[str, ...]]:
    """Return the attempts whose manifests can be read, oldest first, and one sentence for each that cannot."""
    attempts, damaged = [], []
    if (folder / VOID).exists():
        return (), ()
    for path in sorted(folder.glob(PATTERNS[0])):
        try:
            attempts.append(msgspec.json.decode(path.read_bytes(), type=Attempt))
        except (msgspec.MsgspecError, UnicodeDecodeError, OSError) as error:
            damaged.append(f"{path.name} cannot be read, its attempt's answers do not count: {error}")
    return tuple(sorted(attempts, key=lambda one: one.number)), tuple(damaged)


def next_number(folder: Path) -> int:
    """Return the number of an attempt that begins now: higher than any that left a name."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    taken = [int(found[1]) for name in names if (found := _NUMBERED.match(name))]
    return 1 + max(taken, default=0)


def begin_attempt(
    folder: Path, number: int, settings: Mapping[str, str], input_sha256: str, content: Contents, *, retry_failed: bool
) -> Attempt:
    """Write what this attempt runs with; raise WriteError.  content: uint64 [rows], hashes of the input's rows."""
    begun = datetime.now(UTC).isoformat(timespec="seconds")
    attempt = Attempt(number, dict(settings), input_sha256, len(content), retry_failed, begun)
    rows = folder / _ROWS.format(input_sha256[:16])
    if _contents(rows) is None:
        write_durably(rows, _image(content))
    write_durably(folder / _MANIFEST.format(number), msgspec.json.encode(attempt))
    return attempt


def row_maps(
    folder: Path, attempts: tuple[Attempt, ...], input_sha256: str, content: Contents
) -> tuple[dict[int, RowMap], tuple[str, ...]]:
    """Return how the answers of each attempt count for the present input, and one sentence for each whose rows cannot
    be told."""
    forgiven = max((one.number for one in attempts if one.retry_failed), default=0)
    maps: dict[int, RowMap] = {}
    damaged = []
    for one in attempts:
        errors = one.number >= forgiven
        if one.input_sha256 == input_sha256:
            maps[one.number] = RowMap(None, errors)
            continue
        name = _ROWS.format(one.input_sha256[:16])
        old = _contents(folder / name)
        if old is None or len(old) != one.rows:
            damaged.append(f"{name} is missing or damaged: answers of attempt {one.number} do not count")
            continue
        maps[one.number] = RowMap(located(old, content), errors)
    return maps, tuple(damaged)


def located(old: Contents, new: Contents) -> Rows:
    """Return the place in `new` of each of `old`, GONE where it is not there."""
    order = np.argsort(new, kind="stable")
    place = np.searchsorted(new[order], old)
    found = np.full(len(old), GONE, np.int64)
    inside = place < len(new)
    at = order[place[inside]]
    found[inside] = np.where(new[at] == old[inside], at, GONE)
    return found


@contextmanager
def alone(folder: Path, warn: list[str]) -> Iterator[None]:
    """Hold the lock of a folder, making it if need be; raise UsageError while another process has it.

    Where the file system has no locks, a sentence is added to `warn` and nothing is held.
    """
    path = folder / LOCK
    make_folder(folder)
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o664)
    except OSError as error:
        raise write_failed(path, error, 0) from error
    try:
        try:
            flock(handle, LOCK_EX | LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(handle, 200, 0).decode(errors="replace").strip() or "an unknown process"
            raise UsageError(
                f"{folder} is in use by {holder}: two jobs must not write the same output; wait for it to end, or "
                "name another --output-file"
            ) from error
        except OSError as error:
            warn.append(f"{path} cannot be locked ({error.strerror}): see that no second job writes this output")
        else:
            os.truncate(handle, 0)
            os.pwrite(handle, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
        yield
    finally:
        os.close(handle)


# --- inside ---------------------------------------------------------------------------------------------------------


def _image(content: Contents) -> bytes:
    with h5py.File("rows", "w", driver="core", backing_store=False) as file:
        file.create_dataset("content", data=content)
        file.flush()
        return bytes(file.id.get_file_image())


def _contents(path: Path) -> Contents | None:
    """Return the hashes in a file of rows, None when it is not there or damaged."""
    try:
        with h5py.File(path, "r", locking=False) as file:
            content: Contents = np.asarray(file["content"][:], np.uint64)
            return content
    except (OSError, KeyError, ValueError):
        return None
