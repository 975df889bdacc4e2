"""The bytes of KV of one rank: the pools as tensors, and how pages move between device, home and disk.

Resident sequences compute where their pages lie.  A streamed micro-batch has none there: layer by layer its pages are
gathered from home (and disk) into a buffer of one layer, attention runs in it, and the pages that it wrote go back
behind the compute.  The buffers take turns, so the next micro-batch's pages come while this one computes and at most
two layers of KV (three with a disk) are on the device (paper A7: prefill).  What comes next is known, because a step's
micro-batches pass through the layers in order.

Places and numbers are the sequence manager's (`KvPlaces`); nothing is decided here.  A page whose bytes are on their
way is not touched: `settle` waits for what went back, before the next step or boundary reads it (law 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from bgmpi.io.kv_spill import KvSpill
from bgmpi.io.windows import GRAIN
from bgmpi.kernels.backend import Backend, Receipt
from bgmpi.kv_places import KvPlaces
from bgmpi.paged_kv import PagedKV

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Passage:
    """The pages of one streamed micro-batch: which come from where, and which go back where.

    All int64.  at_*: places in the buffer; home, disk: page numbers there.  `table` int32 [S, widest] names the places
    in the buffer by sequence.
    """

    table: NDArray[np.int32]
    home: Numbers
    at_home: Numbers
    disk: Numbers
    at_disk: Numbers
    back_home: Numbers
    at_back_home: Numbers
    back_disk: Numbers
    at_back_disk: Numbers


def passage(places: KvPlaces, slots: NDArray[np.int64], before: NDArray[np.int64], count: NDArray[np.int64]) -> Passage:
    """Plan the pages of streamed sequences that have `before` tokens with KV and compute `count` more.  Pure.

    A page comes from home where the home has it, else from disk; it goes back to the disk where the disk has a place
    for it, else home.  Pages that hold nothing yet do not come; one that several borrow comes once.
    """
    page_tokens = places.page_tokens
    pages = -(-(before + count) // page_tokens)
    ends = np.cumsum(pages)
    row = np.repeat(np.arange(len(slots)), pages)
    ordinal = np.arange(int(ends[-1])) - np.repeat(ends - pages, pages)
    slot = slots[row]
    at_home = ordinal >= places.home.base[slot]
    on_disk = np.zeros(len(row), bool)
    disk = np.zeros(len(row), np.int64)
    if places.disk is not None:
        on_disk = ordinal < places.disk.held[slot]
        disk[on_disk] = places.disk.table[slot[on_disk], ordinal[on_disk]]
    home = np.zeros(len(row), np.int64)
    home[at_home] = places.home.table[slot[at_home], (ordinal - places.home.base[slot])[at_home]]
    place, first = _places_in_buffer(np.where(ordinal < places.home.borrowed[slot], home, -1))
    table = np.full((len(slots), int(pages.max())), -1, np.int32)
    table[row, ordinal] = place
    filled = first & (ordinal * page_tokens < before[row])
    touched = (ordinal + 1) * page_tokens > before[row]
    comes_home, comes_disk = filled & at_home, filled & ~at_home
    goes_disk, goes_home = touched & on_disk, touched & ~on_disk
    return Passage(
        table, home[comes_home], place[comes_home], disk[comes_disk], place[comes_disk], home[goes_home],
        place[goes_home], disk[goes_disk], place[goes_disk],
    )  # fmt: skip


def _places_in_buffer(borrowed: Numbers) -> tuple[Numbers, NDArray[np.bool_]]:
    """Return the place in the buffer of each page, int64 [n], and where each place is named first, bool [n].

    borrowed: int64 [n], page numbers at home of those that several sequences may borrow, -1 for others: a page that is
    borrowed twice comes once.
    """
    name = np.where(borrowed >= 0, borrowed, -1 - np.arange(len(borrowed)))
    _, first, which = np.unique(name, return_index=True, return_inverse=True)
    is_first = np.zeros(len(name), bool)
    is_first[first] = True
    place = np.cumsum(is_first) - 1
    return place[first][which], is_first


class Streamed(Protocol):
    """A micro-batch that passes through."""

    @property
    def passage(self) -> Passage | None:
        """Its pages; None when it is resident."""


class KvStream:
    """Pools, buffers and copies of one rank.

    home [node pages, layers, *page]: the store; device_pages: pages of the private device pool, None to compute at
    home; buffer_pages: pages of one layer in each of `buffers` buffers, 0 when nothing is ever streamed.
    """

    def __init__(
        self, backend: Backend, home: torch.Tensor, *, device_pages: int | None, buffer_pages: int, buffers: int,
        spill: KvSpill | None,
    ) -> None:
        self._backend = backend
        self._home = home
        self._spill = spill
        page = tuple(home.shape[1:])
        self.layers = page[0]
        self._device = None if device_pages is None else backend.empty((device_pages, *page), home.dtype)
        self._compute = home if self._device is None else self._device
        self._buffers = [
            _aligned(backend, (buffer_pages, *page[1:]), home.dtype) for _ in range(buffers if buffer_pages else 0)
        ]
        self._coming: list[list[Receipt]] = [[] for _ in self._buffers]
        self._going: list[list[Receipt]] = [[] for _ in self._buffers]
        self._order: list[tuple[int, Passage]] = []
        self._begun = self._next = self._streamed = 0
        self.buffer_pages = buffer_pages
        self.page_bytes = home[0].numel() * home.element_size()

    def pages_of(self, layer: int) -> torch.Tensor:
        """Return the pages of one layer in which resident sequences compute, [pages, *page]."""
        return self._compute[:, layer]

    # --- streamed micro-batches -----------------------------------------------------------------------------------

    def begin(self, batches: Sequence[Streamed]) -> None:
        """Begin a sweep of these micro-batches through all layers: the first pages set out."""
        streamed = [batch.passage for batch in batches if batch.passage is not None]
        self._order = [(layer, one) for layer in range(self.layers) for one in streamed]
        self._begun = self._next = 0
        for _ in range(min(len(self._buffers) - 1, len(self._order))):
            self._fetch()

    def next_pages(self) -> torch.Tensor:
        """Return the buffer with the pages of the next micro-batch in the sweep's order, all of them there; those of a
        later one set out, into the buffer that was used last."""
        place = self._next % len(self._buffers)
        _wait(self._coming[place])
        if self._begun < len(self._order):
            self._fetch()
        return self._buffers[place]

    def give_back(self) -> None:
        """Let the pages that the micro-batch wrote go back."""
        layer, one = self._order[self._next]
        place = self._next % len(self._buffers)
        buffer, going = self._buffers[place], self._going[place]
        if len(one.back_home):
            going.append(self._backend.copy_pages(self._home[:, layer], one.back_home, buffer, one.at_back_home))
        if len(one.back_disk):
            assert self._spill is not None
            going.append(self._spill.write(layer, one.back_disk, buffer, one.at_back_disk))
        self._next += 1
        pages = len(one.home) + len(one.disk) + len(one.back_home) + len(one.back_disk)
        self._streamed += pages * self.page_bytes // self.layers

    def take_streamed(self) -> int:
        """Return the bytes that passed through the buffers since the last call."""
        bytes_, self._streamed = self._streamed, 0
        return bytes_

    def settle(self) -> None:
        """Return when everything that set out has arrived."""
        for receipts in (*self._coming, *self._going):
            _wait(receipts)

    def _fetch(self) -> None:
        layer, one = self._order[self._begun]
        place = self._begun % len(self._buffers)
        _wait(self._going[place])
        buffer, coming = self._buffers[place], self._coming[place]
        if len(one.disk):
            assert self._spill is not None
            coming.append(self._spill.read(layer, one.disk, buffer, one.at_disk))
        if len(one.home):
            coming.append(self._backend.copy_pages(buffer, one.at_home, self._home[:, layer], one.home))
        self._begun += 1

    # --- whole sequences between the tiers ------------------------------------------------------------------------

    def demote(self, places: KvPlaces, slots: NDArray[np.int64], with_kv: NDArray[np.int64]) -> int:
        """Copy the KV that resident slots have on the device alone to their home -> bytes."""
        assert self._device is not None and places.device is not None
        first = places.stored[slots] // places.page_tokens
        device, home = _between(places.device, places.home, slots, first, -(-with_kv // places.page_tokens))
        return self._copy(self._home, home, self._device, device)

    def promote(self, places: KvPlaces, slots: NDArray[np.int64], with_kv: NDArray[np.int64]) -> int:
        """Copy the KV of streamed slots from home to the device pages that they hold or brought -> bytes."""
        assert self._device is not None and places.device is not None
        first = places.brought[slots]
        device, home = _between(places.device, places.home, slots, first, -(-with_kv // places.page_tokens))
        return self._copy(self._device, device, self._home, home)

    def copy_home(self, pairs: list[tuple[int, int]]) -> int:
        """Copy whole pages at home as if one after another: from, to -> bytes."""
        if pairs:
            self.settle()
        for part in _apart(pairs):
            source, target = np.array(part, np.int64).T
            self._copy(self._home, target, self._home, source)
        return len(pairs) * self.page_bytes

    def spill(self, places: KvPlaces, slots: NDArray[np.int64]) -> int:
        """Write the home pages for which the slots hold new disk pages, layer by layer -> bytes."""
        assert self._spill is not None and places.disk is not None
        first = places.home.base[slots].astype(np.int64)
        home, disk = _between(places.home, places.disk, slots, first, places.disk.held[slots].astype(np.int64))
        receipts: list[Receipt] = [
            self._spill.write(layer, disk, self._home[:, layer], home) for layer in range(self.layers)
        ]
        _wait(receipts)
        return len(home) * self.page_bytes

    def recall(self, places: KvPlaces, slots: NDArray[np.int64], with_kv: NDArray[np.int64]) -> int:
        """Read what the slots have on disk to the home pages that they hold for it -> bytes.

        Disk pages that wait for tokens without KV hold nothing to read.
        """
        assert self._spill is not None and places.disk is not None
        first = np.zeros(len(slots), np.int64)
        filled = np.minimum(places.disk.held[slots], -(-with_kv // places.page_tokens))
        home, disk = _between(places.home, places.disk, slots, first, filled)
        receipts: list[Receipt] = [
            self._spill.read(layer, disk, self._home[:, layer], home) for layer in range(self.layers)
        ]
        _wait(receipts)
        return len(home) * self.page_bytes

    def _copy(self, target: torch.Tensor, target_pages: Numbers, source: torch.Tensor, source_pages: Numbers) -> int:
        if len(target_pages):
            self._backend.copy_pages(target, target_pages, source, source_pages).wait()
        return len(target_pages) * self.page_bytes


def _aligned(backend: Backend, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return device memory that begins at a page of the system, so that disks can write straight into it."""
    size = prod(shape) * dtype.itemsize
    whole = backend.empty((size + GRAIN,), torch.uint8)
    skip = -whole.data_ptr() % GRAIN
    return whole[skip : skip + size].view(dtype).view(shape)


def _between(
    one: PagedKV, other: PagedKV, slots: NDArray[np.int64], first: Numbers, end: Numbers
) -> tuple[Numbers, Numbers]:
    """Return the numbers of pages [first, end) of each slot in two pools."""
    count = np.maximum(end - first, 0)
    row = np.repeat(np.arange(len(slots)), count)
    ordinal = np.arange(len(row)) - np.repeat(np.cumsum(count) - count - first, count)
    slot = slots[row]
    numbers = [pool.table[slot, ordinal - pool.base[slot]].astype(np.int64) for pool in (one, other)]
    return numbers[0], numbers[1]


def _apart(pairs: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Cut copies (from, to) into pieces within which none reads or writes what another writes."""
    pieces: list[list[tuple[int, int]]] = []
    read: set[int] = set()
    written: set[int] = set()
    for source, target in pairs:
        if not pieces or source in written or target in written or target in read:
            pieces.append([])
            read.clear()
            written.clear()
        pieces[-1].append((source, target))
        read.add(source)
        written.add(target)
    return pieces


def _wait(receipts: list[Receipt]) -> None:
    """Wait for all of them and forget them."""
    while receipts:
        receipts.pop().wait()
