"""Pages of KV: who holds which, and the law that none is ever lost (design law 4).

A sequence holds whole pages of `page_tokens` tokens; each decoding sequence has two future pages reserved (paper A5),
so a round of one page of steps can never run dry in its middle.  Reserving counts pages without naming them; only a
reserved page can become a held one.  Every call either does all of what was asked or nothing (allocate, then commit).

Knows slots, never sequences, tokens' values or devices.  Page tables are one array for all slots because every step
reads many of them; rejected: a list of pages per sequence.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bgmpi.errors import InternalError

RESERVE = 2


class PageError(InternalError):
    """Pages leaked, were held twice, or were used without being reserved: all bets are off."""


class PagedKV:
    """The page pool of one rank and the page table of each slot.

    table: int32 [slots, widest], page numbers, -1 behind the last; held, reserved: int32 [slots], pages.
    limit: int32 [slots], the most pages the slot's sequence can ever hold.
    """

    def __init__(self, pages: int, slots: int, page_tokens: int) -> None:
        self.pages = pages
        self.page_tokens = page_tokens
        self.table: NDArray[np.int32] = np.full((slots, 8), -1, np.int32)
        self.held: NDArray[np.int32] = np.zeros(slots, np.int32)
        self.reserved: NDArray[np.int32] = np.zeros(slots, np.int32)
        self.limit: NDArray[np.int32] = np.zeros(slots, np.int32)
        self._stack: NDArray[np.int32] = np.arange(pages - 1, -1, -1, dtype=np.int32)
        self._unheld = pages
        self._reserved = 0
        self._last = "open pool"

    @property
    def free(self) -> int:
        """Pages that are neither held nor reserved."""
        return self._unheld - self._reserved

    def pages_for(self, tokens: int) -> int:
        """Return how many pages `tokens` tokens fill."""
        return -(-tokens // self.page_tokens)

    def open(self, slot: int, tokens: int, most_tokens: int, *, spare: int = 0) -> bool:
        """Hold pages for `tokens` tokens and reserve the next ones for an empty slot; True, or False and no change.

        most_tokens: the longest the sequence can become.  spare: pages that must still be free afterwards.
        """
        if self.held[slot] or self.reserved[slot]:
            raise PageError(f"slot {slot} is opened while it holds {self.held[slot]} + {self.reserved[slot]} pages")
        need, limit = self.pages_for(tokens), self.pages_for(most_tokens)
        ahead = min(RESERVE, limit - need)
        if need + ahead + spare > self.free:
            return False
        self.limit[slot] = limit
        self._reserved += ahead
        self.reserved[slot] = ahead
        self._hold(slot, need)
        self._last = f"open(slot {slot}, {tokens} tokens)"
        return True

    def extend(self, slots: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Turn reserved pages into held ones where `tokens` (int64 [k], tokens to hold) need them, then refill the
        reserves in the order given.

        -> the slots that still lack a page of what they may need next (reserve below min(2, limit - held)).
        """
        need = -(-tokens // self.page_tokens)
        grow = need - self.held[slots]
        for slot, count in zip(slots[grow > 0].tolist(), grow[grow > 0].tolist(), strict=True):
            if count > self.reserved[slot]:
                raise PageError(f"slot {slot} needs {count} pages and has {self.reserved[slot]} reserved")
            self.reserved[slot] -= count
            self._reserved -= count
            self._hold(slot, count)
        want = np.minimum(RESERVE, self.limit[slots] - self.held[slots]) - self.reserved[slots]
        given = np.clip(self.free - (np.cumsum(want) - want), 0, want)
        self.reserved[slots] += given.astype(np.int32)
        self._reserved += int(given.sum())
        self._last = f"extend({len(slots)} slots)"
        lacking: NDArray[np.int64] = slots[given < want]
        return lacking

    def close(self, slots: NDArray[np.int64]) -> None:
        """Give all pages of these slots back."""
        for slot in slots.tolist():
            count = int(self.held[slot])
            self._stack[self._unheld : self._unheld + count] = self.table[slot, :count]
            self._unheld += count
            self.table[slot, :count] = -1
        self._reserved -= int(self.reserved[slots].sum())
        self.held[slots] = 0
        self.reserved[slots] = 0
        self._last = f"close({len(slots)} slots)"

    def check(self) -> None:
        """Raise PageError unless free + held + reserved = pool and no page has two holders (law 4)."""
        held = int(self.held.sum())
        reserved = int(self.reserved.sum())
        if reserved != self._reserved or self.free < 0 or self.free + held + reserved != self.pages:
            raise PageError(
                f"free {self.free} + held {held} + reserved {reserved} = {self.free + held + reserved}, "
                f"pool has {self.pages}; last change: {self._last}"
            )
        named = self.table[self.table >= 0]
        if len(named) != held or len(np.unique(np.concatenate((named, self._stack[: self._unheld])))) != self.pages:
            raise PageError(f"a page has two holders or none; last change: {self._last}")

    def _hold(self, slot: int, count: int) -> None:
        start = int(self.held[slot])
        while start + count > self.table.shape[1]:
            self.table = np.concatenate((self.table, np.full_like(self.table, -1)), axis=1)
        self.table[slot, start : start + count] = self._stack[self._unheld - count : self._unheld]
        self._unheld -= count
        self.held[slot] = start + count
