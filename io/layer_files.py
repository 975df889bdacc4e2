"""Weights straight from disk into a buffer of the caller, as fast as the disk gives them.

Streaming a model that is larger than memory through the page cache costs twice: the kernel copies every byte, and under
a memory limit it spends its time throwing pages out.  So files are opened past the cache (O_DIRECT) where their file
system allows, and a tensor is read in large requests of whole blocks, right to where it is used.  A block is the unit
of such reads, a tensor is not: what is read is the tensor and the rest of its first and last block.  Hence a tensor
lies in the buffer as it lies in the file, at the same distance from the beginning of a block, and several tensors are
joined by rows without a copy as long as their distances fit (sizes of whole blocks, the usual case); one that does not
fit, or whose numbers must change their dtype, passes through a small buffer.  Where the file system refuses, and for
weights that are packed or made up, `ModelFiles` maps or makes them and they are copied.

Knows files and bytes; not what the tensors mean, nor who asks when.  Safe to call from several threads.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from math import prod
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from bgmpi.errors import InputError
from bgmpi.io.model_files import ModelFiles, Stored

#: What reads past the page cache begin and end at a multiple of.
BLOCK = 4096
#: Bytes of one request.
REQUEST = 8 << 20
_HUGE = 2 << 20
_Look = Callable[[torch.Tensor], None]


def aligned_buffer(size: int) -> NDArray[np.uint8]:
    """Return `size` bytes of memory of their own that begin at a multiple of 2 MiB, in huge pages where there are any.

    Filling huge pages takes half the time: the kernel pins and maps 512 times fewer of them.
    """
    held = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system without them is only slower
        held.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(held, np.uint8)
    begin = -whole.ctypes.data % _HUGE
    return whole[begin : begin + size]


class LayerFiles:
    """Reads tensors of one model as `dtype`.  bytes_read: of files, so far; seconds: during which at least one thread
    was reading; direct: whether any file is read past the page cache."""

    def __init__(self, files: ModelFiles, dtype: torch.dtype, *, direct: bool = True) -> None:
        """direct False: map the files even where the file system would allow reading past the page cache."""
        self._files, self._dtype, self._direct = files, dtype, direct
        self._opened: dict[Path, int | None] = {}
        self._lock = threading.Lock()
        self._thread = threading.local()
        self._reading, self._since = 0, 0.0
        self.bytes_read = 0
        self.seconds = 0.0

    @property
    def direct(self) -> bool:
        """Say whether any file was opened past the page cache."""
        return any(one is not None for one in self._opened.values())

    def room(self, names: Sequence[str]) -> int:
        """Return how many bytes `read` needs for these tensors: whole blocks."""
        size = sum(prod(self._files.shape(name)) for name in names) * self._dtype.itemsize
        return -(-size // BLOCK) * BLOCK + BLOCK

    def read(self, names: Sequence[str], place: NDArray[np.uint8], allow_nonfinite: bool = True) -> torch.Tensor:
        """Read tensors into `place`, joined by rows, and return them as one that lies in it.

        names: tensors of equal width; place uint8, at least `room(names)` bytes, beginning at a block.  What else
        `place` holds is overwritten.  allow_nonfinite False: look for NaN and Inf.  Raises InputError naming the file
        when it is cut short or unreadable, and the tensor when it has bad numbers.
        """
        stored = [self._files.stored(name) for name in names]
        first = stored[0]
        begin = first.offset % BLOCK if first is not None and self._fits(first) else 0
        end = begin
        for name, one in zip(names, stored, strict=True):
            look = None if allow_nonfinite else partial(self._files.require_finite, name)
            self._read_one(name, one, place, end, look)
            end += prod(self._files.shape(name)) * self._dtype.itemsize
        shape = self._files.shape(names[0])
        return torch.from_numpy(place[begin:end]).view(self._dtype).view(-1, *shape[1:])

    def close(self) -> None:
        """Close the files.  Nobody may be reading."""
        for handle in self._opened.values():
            if handle is not None:
                os.close(handle)
        self._opened.clear()

    # --- inside ---------------------------------------------------------------------------------------------------

    def _fits(self, stored: Stored) -> bool:
        """Say whether the file's numbers can be used where they land."""
        return stored.dtype == self._dtype and stored.offset % self._dtype.itemsize == 0

    def _read_one(
        self, name: str, stored: Stored | None, place: NDArray[np.uint8], at: int, look: _Look | None
    ) -> None:
        """Read one tensor to place[at:], leaving what lies before it as it is; `look` is shown the file's numbers."""
        handle = self._open(stored.path) if stored is not None else None
        if stored is None or handle is None:
            if stored is not None:
                _require_whole(stored)
            tensor = self._files.tensor(name).reshape(-1)
            with self._timed(tensor.numel() * tensor.element_size()):
                self._put(place, at, tensor, look)
        elif self._fits(stored) and (stored.offset - at) % BLOCK == 0:
            edge = at % BLOCK
            kept = place[at - edge : at].copy()
            with self._timed(stored.size):
                _fill(handle, stored, place[at - edge :], 0, stored.size)
            place[at - edge : at] = kept
            if look is not None:
                look(torch.from_numpy(place[at : at + stored.size]).view(self._dtype))
        else:
            self._read_by_bounce(handle, stored, place, at, look)

    def _read_by_bounce(
        self, handle: int, stored: Stored, place: NDArray[np.uint8], at: int, look: _Look | None
    ) -> None:
        """Read in requests into a buffer of this thread's own, and copy, changing the dtype where it must."""
        bounce = getattr(self._thread, "bounce", None)
        if bounce is None:
            bounce = self._thread.bounce = aligned_buffer(REQUEST + 2 * BLOCK)
        for begin in range(0, stored.size, REQUEST):
            size = min(REQUEST, stored.size - begin)
            edge = (stored.offset + begin) % BLOCK
            with self._timed(size):
                _fill(handle, stored, bounce, begin, size)
            found = bounce[edge : edge + size]
            # A file's numbers need not begin at a multiple of their size.
            aligned = found if stored.offset % stored.dtype.itemsize == 0 else found.copy()
            source = torch.from_numpy(aligned).view(stored.dtype)
            self._put(place, at + begin // stored.dtype.itemsize * self._dtype.itemsize, source, look)

    def _put(self, place: NDArray[np.uint8], at: int, source: torch.Tensor, look: _Look | None) -> None:
        """Copy numbers to place[at:] as the model's dtype."""
        if look is not None:
            look(source)
        target = place[at : at + source.numel() * self._dtype.itemsize]
        torch.from_numpy(target).view(self._dtype).copy_(source)

    @contextmanager
    def _timed(self, size: int) -> Iterator[None]:
        """Count `size` bytes, and the time of the block unless another thread is in one too."""
        with self._lock:
            if not self._reading:
                self._since = time.perf_counter()
            self._reading += 1
        try:
            yield
        finally:
            with self._lock:
                self._reading -= 1
                self.bytes_read += size
                if not self._reading:
                    self.seconds += time.perf_counter() - self._since

    def _open(self, path: Path) -> int | None:
        """Return a handle that reads past the page cache, None where the file system has no such thing."""
        with self._lock:
            if path not in self._opened:
                self._opened[path] = _open_direct(path) if self._direct else None
            return self._opened[path]


def _open_direct(path: Path) -> int | None:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return None
    try:
        # Some file systems take the flag and refuse the reading.
        os.preadv(handle, [memoryview(mmap.mmap(-1, BLOCK))], 0)
    except OSError:
        os.close(handle)
        return None
    return handle


def _require_whole(stored: Stored) -> None:
    """Raise InputError when a file has become shorter: touching a map behind a file's end would end the process."""
    try:
        held = stored.path.stat().st_size
    except OSError as error:
        raise InputError(f"{stored.path}: reading weights failed: {error}") from error
    if held < stored.offset + stored.size:
        raise _cut(stored.path, held, stored.offset + stored.size)


def _cut(path: Path, held: int, needed: int) -> InputError:
    return InputError(
        f"{path}: it ends at byte {held:,}, but a tensor of its header reaches to byte {needed:,}; it was cut while "
        "the job ran, fetch it again"
    )


def _fill(handle: int, stored: Stored, target: NDArray[np.uint8], begin: int, size: int) -> None:
    """Read the whole blocks around bytes [begin, begin + size) of a tensor to the beginning of `target`."""
    start = (stored.offset + begin) // BLOCK * BLOCK
    needed = stored.offset + begin + size - start
    whole = memoryview(target)[: -(-needed // BLOCK) * BLOCK]  # type: ignore[arg-type]
    done = 0
    while done < needed:
        try:
            got = os.preadv(handle, [whole[done : done + REQUEST]], start + done)
        except OSError as error:
            raise InputError(f"{stored.path}: reading weights at byte {start + done:,} failed: {error}") from error
        done += got
        if done < needed and (got == 0 or got % BLOCK):
            raise _cut(stored.path, start + done, stored.offset + stored.size)
