"""Write a file so that it is there whole or not at all, and say plainly why it could not be written.

Results live through kills and full disks only if every file appears by one atomic rename after its bytes are on the
disk (design section 7).  Three things are refused here.  HDF5 never opens a segment for writing: a segment is built in
memory and its bytes are written by plain system calls, so a full disk is an errno and not a corrupt file.  HDF5 never
sees a failed write of the published file either: it was seen to drop errors of evicted chunks in silence and to crash
on close after others, so `HdfSink` keeps the first error for itself and lets HDF5 end cleanly.  And no lock is
ever taken: the files written here have names that no other process knows yet, nor can guess:
in a folder that others may write to, a link that waits under such a name would be written through.

Invariant: after an error, what was there before is untouched and the temporary file is gone.
"""

from __future__ import annotations

import errno
import io
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bgmpi.errors import WriteError

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: errno 11, and 37 as NFS and Lustre give it where locks are missing.
LOCKED = (errno.EAGAIN, errno.ENOLCK)
LOCK_ADVICE = (
    "another process may hold it open for writing, or the file system has no locks (NFS, Lustre without flock); "
    "close the other program, or set HDF5_USE_FILE_LOCKING=FALSE"
)


def write_failed(path: Path, error: OSError, needed: int) -> WriteError:
    """Return the WriteError for a failed write of `needed` bytes to `path`."""
    reason = error.strerror or str(error)
    if error.errno in _NO_SPACE:
        advice = f"{_free_text(path)}; free space or raise the quota, then run again"
    elif error.errno == errno.EROFS:
        advice = "the file system is read-only; choose another --output-file"
    elif error.errno in LOCKED:
        advice = LOCK_ADVICE
    else:
        advice = "check the folder's permissions and the --output-file"
    return WriteError(
        f"cannot write {path}: {reason} (errno {error.errno}); {needed} bytes needed, {advice}. "
        f"Everything written earlier is intact."
    )


def _free_text(path: Path) -> str:
    try:
        room = os.statvfs(path.parent)
    except OSError:
        return "free space unknown"
    return f"{room.f_bavail * room.f_frsize} bytes free"


def sync_folder(folder: Path) -> None:
    """Make renames and new names in `folder` survive a crash of the machine."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(folder: Path) -> None:
    """Let `folder` be there, on the disk too; raise WriteError."""
    try:
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            sync_folder(folder.parent)
    except OSError as error:
        raise write_failed(folder, error, 0) from error


def write_durably(path: Path, data: bytes) -> None:
    """Make `path` hold exactly `data`, atomically and on the disk; raise WriteError and leave nothing otherwise."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        with open(temporary, "xb", buffering=0) as sink:
            write_all(sink, data)
            os.fsync(sink.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        remove_if_there(temporary)
        raise write_failed(path, error, len(data)) from error


def write_all(sink: io.RawIOBase, data: bytes | memoryview) -> None:
    """Write every byte of `data`: a raw write may take only part of it when the disk fills."""
    view = memoryview(data).cast("B")
    done = 0
    while done < len(view):
        done += sink.write(view[done:]) or 0


def remove_if_there(path: Path) -> None:
    """Unlink `path`; a file that is gone, or that cannot go, is left to the error being told."""
    with suppress(OSError):
        path.unlink()


@contextmanager
def replacing(path: Path, temporary: Path, needed: int) -> Iterator[Path]:
    """Yield `temporary` to be written; put it in place of `path` when the block ends well, remove it otherwise.

    `needed` is the estimate of bytes that an error names.
    """
    try:
        yield temporary
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        remove_if_there(temporary)
        raise write_failed(path, error, needed) from error
    except BaseException:
        remove_if_there(temporary)
        raise


class HdfSink(io.FileIO):
    """The raw file under an h5py.File that never shows HDF5 a failed write.

    `failure` is the first error; from then on writes are dropped and reads give zeros, so that HDF5 can close.  Whoever
    writes calls `check` after each block and once after closing HDF5.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "x+b")
        self.failure: OSError | None = None

    def write(self, data: Any, /) -> int:
        """Write all of `data`, or remember why not and claim success."""
        size = memoryview(data).nbytes
        if self.failure is None:
            try:
                view = memoryview(data).cast("B")
                done = 0
                while done < size:
                    done += super().write(view[done:])
            except OSError as error:
                self.failure = error
        return size

    def readinto(self, buffer: Any, /) -> int:
        """Read into `buffer`; what lies past a failure reads as zeros."""
        view = memoryview(buffer).cast("B")
        done = super().readinto(view) or 0
        if self.failure is not None and done < len(view):
            view[done:] = bytes(len(view) - done)
            return len(view)
        return done

    def truncate(self, size: int | None = None, /) -> int:
        """Resize the file, or remember why not."""
        try:
            return super().truncate(size)
        except OSError as error:
            self.failure = self.failure or error
            return size or 0

    def check(self) -> None:
        """Raise the first error, if any."""
        if self.failure is not None:
            raise self.failure
