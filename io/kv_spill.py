"""The disk tier of KV: pages of a layer written behind the compute and read back ahead of it, in sweep order.

A sequence that streams its KV through the device needs each layer's pages once a step, so its full pages, which never
change again, may wait on a disk of the node; the active set then grows past the host memory (design section 5, the
paper's host-first memory one tier lower).  Whoever decides which pages go has the page numbers; here are only layers,
pages and bytes, layer by layer in the file, so that a sweep reads forwards and neighbours go in one request.

Order: operations begin in the order in which they were asked for, and one that meets a page under way (and either of
the two writes) holds the queue until that one is over.  So a read sees the write before it.  Looking past the held one
for others that may go would keep the disk busier, but such meetings are rare: a page is read a whole step after it was
written.

Invariant: a read gives what the last write of the page gave, or its receipt fails; a page whose write failed is unread
until it is written again.  Refused here: which pages, when, and what to do about a full disk.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from bgmpi.errors import BgmpiError, InternalError
from bgmpi.io.spill_file import SpillFile

Pages = NDArray[np.int64]
#: Requests of one operation that a thread takes at once: two threads that meet after every short request cost each
#: other more than the request.
_AT_ONCE = 16


@dataclass(slots=True)
class Traffic:
    """Bytes moved in one direction, and the seconds in which at least one request of it was under way."""

    bytes: int = 0
    seconds: float = 0.0
    requests: int = 0
    under_way: int = 0
    since: float = 0.0

    @property
    def rate(self) -> float:
        """Bytes a second while moving; 0 before anything was moved."""
        return self.bytes / self.seconds if self.seconds else 0.0

    def begin(self, now: float) -> None:
        """Note that a thread goes to the disk."""
        if not self.under_way:
            self.since = now
        self.under_way += 1

    def end(self, now: float, moved: int, requests: int) -> None:
        """Note that a thread came back and moved so many bytes in so many requests."""
        self.bytes += moved
        self.requests += requests
        self.under_way -= 1
        if not self.under_way:
            self.seconds += now - self.since


class SpillReceipt:
    """Proof of an asynchronous write or read.  Until it is done neither side's pages may be touched."""

    def __init__(
        self, write: bool, layer: int, pages: Pages, addresses: NDArray[np.uint64], bounds: Pages, memory: torch.Tensor
    ) -> None:
        """`pages` in rising order with their `addresses` in memory; request i moves those from bounds[i] to
        bounds[i + 1]."""
        self.write, self.layer, self.pages, self.addresses, self.bounds = write, layer, pages, addresses, bounds
        # The addresses are good as long as the tensor is.
        self._memory: torch.Tensor | None = memory
        self.begun = 0
        self.ended = 0
        self.error: BgmpiError | None = None
        self._over = threading.Event()

    def done(self) -> bool:
        """Say whether it has ended, well or badly.  Local, never blocks."""
        return self._over.is_set()

    def wait(self) -> None:
        """Return once every byte has moved; raise WriteError or BgmpiError when one could not.  Local."""
        self._over.wait()
        if self.error is not None:
            raise self.error

    @property
    def requests(self) -> int:
        """Requests to the disk that it takes."""
        return len(self.bounds) - 1

    def meets(self, other: SpillReceipt) -> bool:
        """Say whether the order of the two matters."""
        return (
            (self.write or other.write)
            and self.layer == other.layer
            and bool(np.isin(self.pages, other.pages).any())
        )

    def finish(self) -> None:
        """Let whoever waits go on."""
        self._memory = None
        self._over.set()


class KvSpill:
    """`pages` disk pages of every layer in an unnamed file in `folder`, moved by own threads.

    reads, writes: what went over the disk so far.  direct: whether the page cache is passed by.
    """

    def __init__(
        self, folder: str | Path, rank: int, *, pages: int, layers: int, page_bytes: int, threads: int = 2,
        direct: bool = True,
    ) -> None:
        """Open the file and start `threads` threads; raises MissingError or WriteError when the folder is no good."""
        self.pages, self.layers, self.page_bytes = pages, layers, page_bytes
        self.reads, self.writes = Traffic(), Traffic()
        self._file = SpillFile(folder, rank, pages * layers, page_bytes, direct=direct)
        self.direct = self._file.direct
        # Which pages hold what was written; 1 byte a page, against the tens of thousands that it stands for.
        self._held = np.zeros((layers, pages), dtype=np.bool_)
        self._queue: deque[SpillReceipt] = deque()
        self._under_way: list[SpillReceipt] = []
        self._changed = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._serve, name=f"kv-spill-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def write(self, layer: int, disk_pages: Pages, source: torch.Tensor, source_pages: Pages) -> SpillReceipt:
        """Begin writing pages source_pages[i] of `source` [P, *page] as disk pages disk_pages[i] of `layer`.

        Both int64 [k], disk pages all different; dimension 0 of `source` may be strided, a page is contiguous.
        """
        return self._begin(True, layer, disk_pages, source, source_pages)

    def read(self, layer: int, disk_pages: Pages, target: torch.Tensor, target_pages: Pages) -> SpillReceipt:
        """Begin reading disk pages disk_pages[i] of `layer` into pages target_pages[i] of `target` [P, *page].

        Both int64 [k], target pages all different; dimension 0 of `target` may be strided, a page is contiguous.
        """
        return self._begin(False, layer, disk_pages, target, target_pages)

    def close(self) -> None:
        """End the threads and give the room back; what is still under way fails.  May be called again.

        Returns when memory is no longer touched.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for receipt in (*self._under_way, *self._queue):
            if not receipt.done():
                receipt.error = receipt.error or BgmpiError("the disk tier of KV was closed before this had moved")
                receipt.finish()
        self._under_way.clear()
        self._queue.clear()
        self._file.close()

    def _begin(
        self, write: bool, layer: int, disk_pages: Pages, memory: torch.Tensor, memory_pages: Pages
    ) -> SpillReceipt:
        order = np.argsort(disk_pages, kind="stable")
        pages = disk_pages[order].astype(np.int64, copy=False)
        self._check(write, layer, pages, memory, memory_pages)
        stride = memory.stride(0) * memory.element_size()
        addresses = (memory.data_ptr() + memory_pages[order] * stride).astype(np.uint64)
        bounds = _bounds(pages, self._file.pages_a_request)
        receipt = SpillReceipt(write, layer, pages, addresses, bounds, memory)
        with self._changed:
            if self._closed:
                raise InternalError("the disk tier of KV is closed, nothing can be moved any more")
            if receipt.requests:
                self._queue.append(receipt)
                self._changed.notify_all()
            else:
                receipt.finish()
        return receipt

    def _check(self, write: bool, layer: int, pages: Pages, memory: torch.Tensor, memory_pages: Pages) -> None:
        """`pages` in rising order.  Addresses go to the kernel unseen, so a wrong number would be wild memory."""
        one = memory.shape[1:]
        if memory.device.type != "cpu" or one.numel() * memory.element_size() != self.page_bytes:
            raise InternalError(
                f"a page to spill must be {self.page_bytes} bytes of host memory, got {tuple(one)} of {memory.dtype} "
                f"on {memory.device}"
            )
        if memory.shape[0] and not memory[0].is_contiguous():
            raise InternalError(f"a page to spill must be contiguous, got strides {memory.stride()} of {memory.shape}")
        if not 0 <= layer < self.layers:
            raise InternalError(f"layer {layer} of the disk tier: it has {self.layers}")
        if pages.shape != memory_pages.shape or pages.ndim != 1:
            raise InternalError(f"as many disk pages as memory pages, got {pages.shape} and {memory_pages.shape}")
        for kind, numbers, count in (("disk", pages, self.pages), ("memory", memory_pages, memory.shape[0])):
            if len(numbers) and not 0 <= numbers.min() <= numbers.max() < count:
                raise InternalError(f"{kind} pages {numbers.min()} to {numbers.max()}: there are {count}")
        if write and (pages[1:] == pages[:-1]).any():
            raise InternalError("a disk page was named twice in one write")

    def _serve(self) -> None:
        while (taken := self._take()) is not None:
            receipt, requests = taken
            # What nobody foresaw ends this thread, but never leaves a receipt waiting.
            error: BgmpiError | None = InternalError("a thread of the disk tier failed, see its traceback in the log")
            try:
                error = self._carry_out(receipt, requests)
            finally:
                self._end(receipt, requests, error)

    def _take(self) -> tuple[SpillReceipt, range] | None:
        """Wait for the next requests to the disk, all of one operation; None when closed."""
        with self._changed:
            while not self._closed:
                if self._queue and (self._queue[0].begun or self._may_begin(self._queue[0])):
                    receipt = self._queue[0]
                    share = -(-(receipt.requests - receipt.begun) // len(self._threads))
                    requests = range(receipt.begun, receipt.begun + min(share, _AT_ONCE))
                    receipt.begun = requests.stop
                    if receipt.begun == receipt.requests:
                        self._queue.popleft()
                    self._traffic(receipt).begin(time.perf_counter())
                    return receipt, requests
                self._changed.wait()
            return None

    def _may_begin(self, receipt: SpillReceipt) -> bool:
        if any(receipt.meets(other) for other in self._under_way):
            return False
        held = self._held[receipt.layer]
        if receipt.write:
            held[receipt.pages] = False
        elif not held[receipt.pages].all():
            missing = receipt.pages[~held[receipt.pages]]
            receipt.error = InternalError(
                f"{len(missing)} disk pages of layer {receipt.layer} were to be read (first {missing[0]}), but no "
                f"write of them has succeeded"
            )
        self._under_way.append(receipt)
        return True

    def _carry_out(self, receipt: SpillReceipt, requests: range) -> BgmpiError | None:
        bounds = receipt.bounds[requests.start : requests.stop + 1].tolist()
        for first, last in pairwise(bounds):
            if receipt.error is not None:
                return receipt.error
            cell = receipt.layer * self.pages + int(receipt.pages[first])
            try:
                self._file.move(cell, receipt.addresses[first:last], write=receipt.write)
            except OSError as error:
                return self._failure(receipt, error)
        return None

    def _end(self, receipt: SpillReceipt, requests: range, error: BgmpiError | None) -> None:
        pages = receipt.bounds[requests.stop] - receipt.bounds[requests.start]
        with self._changed:
            moved = 0 if error else int(pages) * self.page_bytes
            self._traffic(receipt).end(time.perf_counter(), moved, len(requests))
            receipt.error = receipt.error or error
            receipt.ended += len(requests)
            if receipt.ended < receipt.requests:
                return
        if receipt.write and receipt.error is None:
            receipt.error = self._settle(receipt)
        with self._changed:
            if receipt.write and receipt.error is None:
                self._held[receipt.layer, receipt.pages] = True
            self._under_way.remove(receipt)
            self._changed.notify_all()
        receipt.finish()

    def _settle(self, receipt: SpillReceipt) -> BgmpiError | None:
        cells = receipt.layer * self.pages + receipt.pages[receipt.bounds[:-1]]
        try:
            self._file.settle(cells, np.diff(receipt.bounds))
        except OSError as error:
            return self._failure(receipt, error)
        return None

    def _failure(self, receipt: SpillReceipt, error: OSError) -> BgmpiError:
        return self._file.failure(error, write=receipt.write, needed=len(receipt.pages) * self.page_bytes)

    def _traffic(self, receipt: SpillReceipt) -> Traffic:
        return self.writes if receipt.write else self.reads


def _bounds(pages: Pages, most: int) -> Pages:
    """Cut `pages`, in rising order, into runs of neighbours of at most `most`: int64 [runs + 1], ends with len(pages).

    One place, [0], when there are no pages.
    """
    place = np.arange(len(pages))
    breaks = np.concatenate([[True], np.diff(pages) != 1])[: len(pages)]
    since = place - np.maximum.accumulate(np.where(breaks, place, 0))
    return np.append(np.flatnonzero(since % most == 0), len(pages)).astype(np.int64)
