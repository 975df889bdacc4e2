"""Where the KV of a rank's active sequences lies, in up to three pools of pages (design section 5).

Home: pages in the node's host memory; every sequence with KV has its pages there.  Device: where there is a device
pool, a sequence is resident when all its pages are also on the device, where it computes; without one the home is
where it computes.  A sequence that is not resident is streamed: layer by layer its pages pass through the device.
Disk: pages before the last never change again, so a streamed sequence may have its first pages on disk instead of at
home.

A prefix that several share lies once in either pool (`shared_prefixes`, `device_twins`).

Pure numpy; one row a slot.  It says which pages, never who should move (sequence_manager) or how (executor).  Whoever
moves bytes allocates first, moves, and only then tells that they moved; until then the old place stays valid.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bgmpi.backlog import Entry
from bgmpi.device_twins import DeviceTwins
from bgmpi.errors import InternalError
from bgmpi.paged_kv import PagedKV, Pages

Slots = NDArray[np.int64]


class KvPlaces:
    """The pools and what each slot has in them.

    resident: bool [slots]; stored: int64 [slots], tokens of a resident sequence whose KV is at home too (only counted
    where there is a device pool); brought: int64 [slots], pages of a slot that began to be promoted whose bytes are on
    the device already; streamed_most: pages of the longest sequence that can be streamed; stream: streamed
    sequences decode too, else they wait until the device has room.
    """

    def __init__(
        self, *, slots: int, page_tokens: int, pages: int, first: int = 0, device_pages: int | None = None,
        disk_pages: int = 0, streamed_most: int = 0, stream: bool = True,
    ) -> None:
        self.page_tokens = page_tokens
        self.home = PagedKV(pages, slots, page_tokens, first=first)
        self.device = None if device_pages is None else PagedKV(device_pages, slots, page_tokens)
        self._twins = None if self.device is None else DeviceTwins(self.device)
        self.disk = PagedKV(disk_pages, slots, page_tokens, reserve=0) if disk_pages else None
        self.resident: NDArray[np.bool_] = np.zeros(slots, bool)
        self.stored: NDArray[np.int64] = np.zeros(slots, np.int64)
        self.brought: NDArray[np.int64] = np.zeros(slots, np.int64)
        self.streamed_most = streamed_most
        self.stream = stream

    @property
    def compute(self) -> PagedKV:
        """The pool in which resident sequences compute."""
        return self.home if self.device is None else self.device

    def longest(self) -> int:
        """Return the pages of the longest sequence that can ever run here."""
        most = self.home.pages
        if self.device is not None:
            most = min(most, self.streamed_most, *(() if self.stream else (self.device.pages,)))
        return most

    def fits(self, tokens: int) -> bool:
        """Say whether a sequence of that many tokens can ever run here."""
        return self.home.pages_for(tokens) <= self.longest()

    # --- slots ----------------------------------------------------------------------------------------------------

    def open(self, slot: int, entry: Entry, spare: int, *, crowded: bool = False,
             borrowed: Pages | None = None) -> bool:
        """Give an empty slot the pages of a sequence: those it kept and those it needs; True, or False and no change.

        borrowed: pages at home, of a shared prefix, that stand before its own.  Resident where it computes at home.
        Where the home cannot hold a new sequence, or is `crowded`, its full pages go to the disk, if that has room for
        them; those of a sequence that shares a prefix stay at home.
        """
        on_disk = len(entry.disk)
        if crowded and self._opened_on_disk(slot, entry, spare):
            return True
        if not self.home.open(
            slot, len(entry.tokens), entry.most, spare=spare, base=on_disk, parked=entry.home, borrowed=borrowed
        ):
            return not crowded and self._opened_on_disk(slot, entry, spare)
        if on_disk:
            assert self.disk is not None
            self.disk.open(slot, on_disk * self.page_tokens, entry.most, parked=entry.disk)
        self.resident[slot] = self.device is None and not on_disk
        self.stored[slot] = entry.with_kv
        return True

    def _opened_on_disk(self, slot: int, entry: Entry, spare: int) -> bool:
        """Open a sequence without KV so that its full pages go to the disk as they come; False where that cannot be."""
        full = len(entry.tokens) // self.page_tokens
        if self.disk is None or entry.with_kv or entry.prefixes or not full or full > self.disk.free:
            return False
        if self.home.pages_for(entry.most) > self.streamed_most:
            return False
        if not self.home.open(slot, len(entry.tokens), entry.most, spare=spare, base=full):
            return False
        self.disk.take(slot, full)
        self.resident[slot] = False
        self.stored[slot] = 0
        return True

    def close(self, slots: Slots) -> None:
        """Give back all that these slots have."""
        self._leave_device(slots)
        for pool in (self.home, self.disk):
            if pool is not None:
                pool.close(slots)
        self.resident[slots] = False

    def park(self, slot: int, with_kv: int) -> tuple[Pages, Pages]:
        """Take a slot's own pages off it and keep those with KV: home pages and disk pages.  A resident sequence of a
        device must have been demoted before."""
        if self.device is not None and self.resident[slot]:
            raise InternalError(f"slot {slot} should leave while its KV is only on the device")
        self._leave_device(np.array([slot], np.int64))
        disk = self.disk.park(slot) if self.disk is not None else np.empty(0, np.int32)
        self.resident[slot] = False
        full = self.home.pages_for(with_kv) - int(self.home.borrowed[slot])
        home = self.home.park(slot)
        if self.disk is not None:
            self.disk.release(disk[full:])
        self.home.release(home[max(0, full - len(disk)) :])
        return home[: max(0, full - len(disk))], disk[:full]

    def release(self, entry: Entry) -> None:
        """Give back the pages that an entry kept."""
        self.home.release(entry.home)
        if self.disk is not None:
            self.disk.release(entry.disk)

    def grow(self, slots: Slots, tokens: NDArray[np.int64]) -> None:
        """Hold pages for `tokens` int64 [k] wherever the slots compute, and refill their reserves."""
        self.home.extend(slots, tokens)
        if self.device is not None:
            resident = self.resident[slots]
            self.device.extend(slots[resident], tokens[resident])

    def reserve_disk(self, slots: Slots, tokens: NDArray[np.int64]) -> None:
        """Hold disk pages for those that sequences with pages there will have full at `tokens` int64 [k]; a full disk
        leaves them at home."""
        if self.disk is None:
            return
        grow = tokens // self.page_tokens - self.disk.held[slots]
        for place in np.flatnonzero((self.disk.held[slots] > 0) & (grow > 0)).tolist():
            self.disk.take(int(slots[place]), int(grow[place]))

    # --- between device and home ----------------------------------------------------------------------------------

    def begin_promotion(self, slot: int, tokens: int, most: int, spare: int) -> bool:
        """Hold device pages for a streamed sequence; True, or False and no change."""
        assert self.device is not None and self._twins is not None
        home = self.home.table[slot, : self.home.borrowed[slot]].copy()
        self.brought[slot] = len(home) - self._twins.missing(home)
        twins = self._twins.borrow(home, spare)
        if twins is None:
            return False
        if self.device.open(slot, tokens, most, spare=spare, borrowed=twins):
            return True
        self._twins.give_back(home)
        return False

    def _leave_device(self, slots: Slots) -> None:
        """Give back the device pages of these slots."""
        if self.device is None or self._twins is None:
            return
        for slot in slots[self.device.borrowed[slots] > 0].tolist():
            self._twins.give_back(self.home.table[slot, : self.device.borrowed[slot]].copy())
        self.device.close(slots)

    def end_promotion(self, slots: Slots, with_kv: NDArray[np.int64]) -> None:
        """Tell that the KV of these slots has come to the device."""
        self.resident[slots] = True
        self.stored[slots] = with_kv

    def end_demotion(self, slots: Slots) -> None:
        """Tell that all KV of these resident slots is at home; their device pages are given back."""
        self.resident[slots] = False
        self._leave_device(slots)

    # --- between home and disk ------------------------------------------------------------------------------------

    def can_spill(self, slots: Slots, with_kv: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many full pages each slot has at home that could go to disk, int64 [k]."""
        full = with_kv // self.page_tokens - self.home.base[slots]
        fits = (self.home.limit[slots] <= self.streamed_most) & (self.home.borrowed[slots] == 0)
        streamed = ~self.resident[slots] if self.device is not None else True
        return np.where(fits & streamed, np.maximum(full, 0), 0)

    def begin_spill(self, slot: int, pages: int) -> bool:
        """Hold `pages` further disk pages for a slot; True, or False and no change."""
        assert self.disk is not None
        return self.disk.take(slot, pages)

    def end_spill(self, slots: Slots) -> None:
        """Tell that the disk holds what was begun: those home pages are given back, and the slots are streamed."""
        assert self.disk is not None
        for slot in slots.tolist():
            self.home.drop_front(slot, int(self.disk.held[slot] - self.home.base[slot]))
        self.resident[slots] = False

    def begin_recall(self, slot: int, spare: int) -> bool:
        """Hold home pages for what a slot has on disk; True, or False and no change."""
        return self.home.put_front(slot, spare)

    def end_recall(self, slots: Slots) -> None:
        """Tell that what these slots had on disk is at home; their disk pages are given back."""
        assert self.disk is not None
        self.disk.close(slots)
        self.resident[slots] = self.device is None

    def spills(self, slots: Slots) -> NDArray[np.bool_]:
        """Say which slots have pages on disk: bool [k]."""
        if self.disk is None:
            return np.zeros(len(slots), bool)
        on_disk: NDArray[np.bool_] = self.disk.held[slots] > 0
        return on_disk

    def check(self, active: Slots, known: NDArray[np.int64]) -> None:
        """Raise InternalError unless every page has one holder and every active sequence has all that it needs."""
        for pool in (self.home, self.device, self.disk):
            if pool is not None:
                pool.check()
        if self._twins is not None and self.device is not None:
            lent = np.arange(self.home.table.shape[1]) < self.device.borrowed[:, None]
            self._twins.check(self.home.table[lent])
        if (self.home.end(active) < known).any():
            raise InternalError("an active sequence knows more tokens than its pages hold")
        if self.disk is not None and (self.disk.held[active] < self.home.base[active]).any():
            raise InternalError("the first pages of an active sequence are neither at home nor on disk")
        if self.disk is None and self.home.base[active].any():
            raise InternalError("an active sequence lacks its first pages at home, and there is no disk")
        if self.device is not None:
            resident = active[self.resident[active]]
            if (self.device.end(resident) < known[self.resident[active]]).any():
                raise InternalError("a resident sequence has fewer pages on the device than it needs")
