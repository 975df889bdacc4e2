"""The unnamed file behind the disk tier of KV: cells of one page, moved in large requests past the page cache.

KV that the host memory cannot hold waits on a disk of the node (design section 5).  It lives no longer than its
process, so the file has no name from the start: after any kill the kernel takes it back, and two jobs cannot meet.  It
is as long as it can ever become, but sparse: only what is written takes room.

The disk is asked directly (O_DIRECT) where the file system allows it: the page cache would take memory from the very
KV that had to leave.  Direct requests want addresses and sizes in whole blocks of 4096 bytes, so cells begin at
multiples of that, and pages that do not lie so pass through a huge-page buffer of the thread.  Where it is not allowed,
the cache is used and told at once to forget, after the bytes are on the disk: a write that only seems to have succeeded
would be found out when nobody can repair it.

One call moves many pages that are neighbours on disk to or from anywhere in memory (preadv, pwritev).  ctypes reaches
them with the list of pieces as an array, so that no Python object exists per page, which `os.preadv` needs.

Refused here: layers, sequences, threads and their order (`kv_spill.py`).
Invariant: a call has moved every byte or raises.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import tempfile
import threading
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from bgmpi.errors import BgmpiError, MissingError, WriteError

#: Bytes to which direct requests are aligned, in memory and in the file.
BLOCK = 4096
#: Bytes in one request at most (a cell that is larger goes alone), and pieces in it (IOV_MAX of Linux).
REQUEST = 8 << 20
PIECES = 1024
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def free_bytes(folder: str | Path) -> int:
    """Return the bytes that an ordinary user may still write below `folder`; MissingError when it is not there."""
    try:
        room = os.statvfs(folder)
    except OSError as error:
        raise MissingError(
            f"--kv-spill {folder}: {error.strerror} (errno {error.errno}); it must be a folder that exists on a disk "
            f"of every node"
        ) from error
    return room.f_bavail * room.f_frsize


def cell_bytes(page_bytes: int) -> int:
    """Return what a page of that size takes at most on disk, bytes."""
    return -(-page_bytes // BLOCK) * BLOCK


class SpillFile:
    """`cells` places of `page_bytes` bytes each in an unnamed file in `folder`.

    direct: whether the page cache is passed by.  cell: bytes from one place to the next.
    Every method may be called from several threads at once; whoever calls keeps them off the same cells.
    """

    def __init__(self, folder: str | Path, rank: int, cells: int, page_bytes: int, *, direct: bool = True) -> None:
        """Open the file; `direct=False` uses the page cache even where it could be passed by.

        Raises MissingError when the folder is not there, WriteError when nothing can be written in it.
        """
        self.folder = Path(folder)
        self.page_bytes = page_bytes
        self.direct = direct
        self._who = f"rank {rank}: --kv-spill {folder}"
        libc = ctypes.CDLL(None, use_errno=True)
        self._write, self._read = libc.pwritev, libc.preadv
        for call in (self._write, self._read):
            call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
            call.restype = ctypes.c_ssize_t
        self._buffers = threading.local()
        self._syncing = threading.Lock()
        self._lost: OSError | None = None
        if not self.folder.is_dir():
            raise MissingError(f"{self._who} is not a folder; it must exist on a disk of every node")
        try:
            self._file: IO[bytes] = tempfile.TemporaryFile(  # noqa: SIM115
                buffering=0, prefix=f"bgmpi-kv-{rank}-", dir=self.folder
            )
        except OSError as error:
            raise self.failure(error, write=True, needed=cells * page_bytes) from error
        try:
            self.direct = direct and self._passes_the_cache()
            self.cell = cell_bytes(page_bytes) if self.direct else page_bytes
            os.ftruncate(self._file.fileno(), max(BLOCK, cells * self.cell))
            self._try_out()
        except OSError as error:
            self._file.close()
            raise self.failure(error, write=True, needed=cells * page_bytes) from error

    @property
    def pages_a_request(self) -> int:
        """How many neighbouring cells one call of `move` may take."""
        return max(1, min(PIECES, REQUEST // self.cell))

    def move(self, cell: int, addresses: NDArray[np.uint64], *, write: bool) -> None:
        """Move the pages at `addresses`, one after the other, to (`write`) or from the cells from `cell` on.

        At most `pages_a_request`.  Blocks; raises OSError, and then what the target holds is unknown.
        """
        if self._lost is not None:
            raise self._lost
        whole = not self.page_bytes % BLOCK and not (addresses % np.uint64(BLOCK)).any()
        if whole or not self.direct:
            sizes = np.full_like(addresses, self.page_bytes)
            self._transfer(np.stack([addresses, sizes], axis=1), cell * self.cell, write=write)
        else:
            self._move_by_buffer(cell, addresses, write=write)
        if not self.direct and not write:
            self._forget(cell, len(addresses))

    def settle(self, cells: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """Make sure that what was written into these runs of cells is on the disk; raises OSError.

        The kernel tells a lost page once, to whoever asks first, and not whose it was: after one loss all is lost.
        """
        if self.direct:
            return
        with self._syncing:
            if self._lost is not None:
                raise self._lost
            try:
                os.fdatasync(self._file.fileno())
            except OSError as error:
                self._lost = error
                raise
        for cell, count in zip(cells.tolist(), counts.tolist(), strict=True):
            self._forget(cell, count)

    def failure(self, error: OSError, *, write: bool, needed: int) -> BgmpiError:
        """Say what went wrong in moving `needed` bytes, and what to do: a WriteError, or a BgmpiError of a read."""
        reason = f"{error.strerror or error} (errno {error.errno})"
        if not write:
            return BgmpiError(
                f"{self._who}: cannot read {needed} bytes of KV back: {reason}; check the disk, then run again, or run "
                f"without --kv-spill"
            )
        if error.errno in _NO_SPACE:
            advice = (
                f"{self._room()}; lower --kv-spill-bytes, free space or raise the limit on the size of files "
                f"(ulimit -f, quota), or name another folder"
            )
        else:
            advice = "name a folder that can be written on a disk of the node, or run without --kv-spill"
        return WriteError(f"{self._who}: cannot write KV: {reason}; {needed} bytes needed, {advice}")

    def close(self) -> None:
        """Give the room back.  No call may be under way; may be called again."""
        self._file.close()

    def _passes_the_cache(self) -> bool:
        handle = self._file.fileno()
        try:
            fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        return True

    def _try_out(self) -> None:
        """Write and read one block: some file systems promise direct requests and refuse the first."""
        block = np.array([[self._buffer(), BLOCK]], dtype=np.uint64)
        try:
            self._transfer(block, 0, write=True)
            self._transfer(block, 0, write=False)
        except OSError as error:
            if not self.direct or error.errno != errno.EINVAL:
                raise
            handle = self._file.fileno()
            fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) & ~os.O_DIRECT)
            self.direct = False
            self._try_out()

    def _move_by_buffer(self, cell: int, addresses: NDArray[np.uint64], *, write: bool) -> None:
        buffer = self._buffer()
        places = range(buffer, buffer + len(addresses) * self.cell, self.cell)
        whole = np.array([[buffer, len(addresses) * self.cell]], dtype=np.uint64)
        if write:
            for place, address in zip(places, addresses.tolist(), strict=True):
                ctypes.memmove(place, address, self.page_bytes)
        self._transfer(whole, cell * self.cell, write=write)
        if not write:
            for place, address in zip(places, addresses.tolist(), strict=True):
                ctypes.memmove(address, place, self.page_bytes)

    def _transfer(self, pieces: NDArray[np.uint64], offset: int, *, write: bool) -> None:
        """Move `pieces` (address, size) to or from the file at `offset`, in as many calls as the kernel wants."""
        call = self._write if write else self._read
        while len(pieces):
            moved = call(self._file.fileno(), pieces.ctypes.data, len(pieces), offset)
            if moved < 0:
                code = ctypes.get_errno()
                if code == errno.EINTR:
                    continue
                raise OSError(code, os.strerror(code))
            if moved == 0:
                raise OSError(errno.EIO, "the file ends early")
            offset += moved
            pieces = _rest(pieces, moved)

    def _buffer(self) -> int:
        """Return the address of this thread's buffer of one request, made when first asked for."""
        if (held := getattr(self._buffers, "held", None)) is None:
            size = max(REQUEST, -(-self.page_bytes // BLOCK) * BLOCK)
            held = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                _advise_huge(held)
            self._buffers.held = held
        return int(np.frombuffer(held, dtype=np.uint8).ctypes.data)

    def _forget(self, cell: int, count: int) -> None:
        os.posix_fadvise(self._file.fileno(), cell * self.cell, count * self.cell, os.POSIX_FADV_DONTNEED)

    def _room(self) -> str:
        try:
            return f"{free_bytes(self.folder)} bytes free"
        except MissingError:
            return "free space unknown"


def _rest(pieces: NDArray[np.uint64], moved: int) -> NDArray[np.uint64]:
    """Return what of `pieces` is left after their first `moved` bytes."""
    ends = np.cumsum(pieces[:, 1])
    whole = int(np.searchsorted(ends, moved, side="right"))
    rest = pieces[whole:].copy()
    if len(rest):
        into = np.uint64(moved) - (ends[whole - 1] if whole else np.uint64(0))
        rest[0, 0] += into
        rest[0, 1] -= into
    return rest


def _advise_huge(held: Any) -> None:
    try:
        held.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        # A kernel without transparent huge pages says EINVAL; ordinary pages do, slower.
        if error.errno != errno.EINVAL:
            raise
