"""Pages of KV: who holds which, and the law that none is ever lost (design law 4).

A sequence holds whole pages of `page_tokens` tokens; each decoding sequence has two future pages reserved (paper A5),
so a round of one page of steps can never run dry in its middle.  Reserving counts pages without naming them; only a
reserved page can become a held one.  Pages of a sequence that lost its slot but kept its KV are parked: whoever parked
them knows their numbers.  Pages of a shared prefix are parked too, and any number of slots borrow them: they stand
first in a slot's table and are none of its own.  So every page has one holder, and who may still read it is counted by
the prefix (`shared_prefixes`).  Every call either does all of what was asked or nothing (allocate, then commit).

Knows slots, never sequences, tokens' values or devices.  Page numbers are names: a rank's first pool counts from
`first`, and pools of one node may trade numbers (`trade`), so that KV changes its owner without a copy.  Page tables
are one array for all slots because every step reads many of them; rejected: a list of pages per sequence.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bgmpi.errors import InternalError

RESERVE = 2

Pages = NDArray[np.int32]


class PageError(InternalError):
    """Pages leaked, were held twice, or were used without being reserved: all bets are off."""


class PagedKV:
    """The page pool of one rank and the page table of each slot.

    table: int32 [slots, widest], page numbers, -1 behind the last; held, reserved: int32 [slots], pages.
    base: int32 [slots], the ordinal of the first page in the table (its predecessors lie elsewhere): table[slot, i] has
    the tokens from (base + i) * page_tokens on.  borrowed: int32 [slots], how many pages at the table's begin are a
    shared prefix's; those held stand behind them.  limit: int32 [slots], the ordinal behind the last page that the
    slot's sequence can ever need.  parked: pages that no slot holds.
    """

    def __init__(self, pages: int, slots: int, page_tokens: int, *, first: int = 0, reserve: int = RESERVE) -> None:
        self.pages = pages
        self.page_tokens = page_tokens
        self.table: Pages = np.full((slots, 8), -1, np.int32)
        self.held: NDArray[np.int32] = np.zeros(slots, np.int32)
        self.reserved: NDArray[np.int32] = np.zeros(slots, np.int32)
        self.base: NDArray[np.int32] = np.zeros(slots, np.int32)
        self.borrowed: NDArray[np.int32] = np.zeros(slots, np.int32)
        self.limit: NDArray[np.int32] = np.zeros(slots, np.int32)
        self.parked = 0
        self._most_reserved = reserve
        self._stack: Pages = np.arange(first + pages - 1, first - 1, -1, dtype=np.int32)
        self._unheld = pages
        self._reserved = 0
        self._last = "open pool"

    @property
    def free(self) -> int:
        """Pages that are neither held, parked nor reserved."""
        return self._unheld - self._reserved

    def pages_for(self, tokens: int) -> int:
        """Return how many pages `tokens` tokens fill."""
        return -(-tokens // self.page_tokens)

    def end(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the tokens that the slots' pages reach to, int64 [k]."""
        reached: NDArray[np.int64] = (self._first(slots) + self.held[slots]).astype(np.int64) * self.page_tokens
        return reached

    def row(self, slot: int) -> Pages:
        """Return the page numbers of a slot in order, those that it borrows and those that it holds."""
        return self.table[slot, : self.borrowed[slot] + self.held[slot]].copy()

    # --- slots ----------------------------------------------------------------------------------------------------

    def open(self, slot: int, tokens: int, most_tokens: int, *, spare: int = 0, base: int = 0,
             parked: Pages | None = None, borrowed: Pages | None = None) -> bool:
        """Hold pages for `tokens` tokens and reserve the next ones for an empty slot; True, or False and no change.

        most_tokens: the longest the sequence can become.  spare: pages that must still be free afterwards.  base:
        leading pages that lie elsewhere.  borrowed: pages of a shared prefix, which come next.  parked: pages of this
        sequence, in order, that become the first ones held.
        """
        if self.held[slot] or self.reserved[slot]:
            raise PageError(f"slot {slot} is opened while it holds {self.held[slot]} + {self.reserved[slot]} pages")
        kept = 0 if parked is None else len(parked)
        lent = 0 if borrowed is None else len(borrowed)
        need, limit = max(self.pages_for(tokens) - base - lent, kept), self.pages_for(most_tokens)
        ahead = max(0, min(self._most_reserved, limit - base - lent - need))
        if need - kept + ahead + spare > self.free:
            return False
        self.base[slot], self.limit[slot] = base, limit
        if borrowed is not None:
            self._write(slot, 0, borrowed)
            self.borrowed[slot] = lent
        self._reserved += ahead
        self.reserved[slot] = ahead
        if parked is not None:
            self._seat(slot, parked)
            self.parked -= kept
        self._hold(slot, need - kept)
        self._last = f"open(slot {slot}, {tokens} tokens, {kept} parked pages)"
        return True

    def extend(self, slots: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Turn reserved pages into held ones where `tokens` (int64 [k], tokens to hold) need them, then refill the
        reserves in the order given.

        -> the slots that still lack a page of what they may need next (reserve below min(2, limit - end)).
        """
        need = -(-tokens // self.page_tokens) - self._first(slots)
        grow = need - self.held[slots]
        for slot, count in zip(slots[grow > 0].tolist(), grow[grow > 0].tolist(), strict=True):
            if count > self.reserved[slot]:
                raise PageError(f"slot {slot} needs {count} pages and has {self.reserved[slot]} reserved")
            self.reserved[slot] -= count
            self._reserved -= count
            self._hold(slot, count)
        ahead = self.limit[slots] - self._first(slots) - self.held[slots]
        want = np.clip(ahead, 0, self._most_reserved) - self.reserved[slots]
        given = np.clip(self.free - (np.cumsum(want) - want), 0, want)
        self.reserved[slots] += given.astype(np.int32)
        self._reserved += int(given.sum())
        self._last = f"extend({len(slots)} slots)"
        lacking: NDArray[np.int64] = slots[given < want]
        return lacking

    def growing(self, slots: NDArray[np.int64]) -> int:
        """Return how many of the slots may need more pages than they hold and have reserved."""
        ends = self._first(slots) + self.held[slots] + self.reserved[slots]
        return int((ends < self.limit[slots]).sum())

    def dry(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Say which slots have no page reserved though their sequence may need one: bool [k]."""
        dry: NDArray[np.bool_] = (self.reserved[slots] == 0) & (
            self._first(slots) + self.held[slots] < self.limit[slots]
        )
        return dry

    def close(self, slots: NDArray[np.int64]) -> None:
        """Give all pages of these slots back."""
        for slot in slots.tolist():
            self._push(self._lift(slot))
        self._last = f"close({len(slots)} slots)"

    def park(self, slot: int) -> Pages:
        """Take the pages that it holds off a slot, in order; they stay parked until `open` or `release` gets them."""
        pages = self._lift(slot)
        self.parked += len(pages)
        self._last = f"park(slot {slot})"
        return pages

    def lend(self, slot: int, count: int) -> Pages:
        """Park the first `count` pages that a slot holds, in order, for a shared prefix; the slot goes on to use them,
        borrowed."""
        if count > self.held[slot]:
            raise PageError(f"slot {slot} holds {self.held[slot]} pages and should lend {count}")
        first = int(self.borrowed[slot])
        self.borrowed[slot] += count
        self.held[slot] -= count
        self.parked += count
        self._last = f"lend(slot {slot}, {count} pages)"
        return self.table[slot, first : first + count].copy()

    def drop_front(self, slot: int, count: int) -> None:
        """Give the first `count` pages of a slot, which borrows none, back: their tokens lie elsewhere now."""
        if count > self.held[slot] or self.borrowed[slot]:
            raise PageError(f"slot {slot} holds {self.held[slot]} pages, borrows {self.borrowed[slot]} and should drop "
                            f"{count}")
        self._push(self.table[slot, :count].copy())
        left = int(self.held[slot]) - count
        self.table[slot, :left] = self.table[slot, count : count + left].copy()
        self.table[slot, left : left + count] = -1
        self.held[slot] = left
        self.base[slot] += count
        self._last = f"drop_front(slot {slot}, {count} pages)"

    def take(self, slot: int, count: int) -> bool:
        """Hold `count` further pages for a slot, past any reserve; True, or False and no change."""
        if count > self.free:
            return False
        self._hold(slot, count)
        self._last = f"take(slot {slot}, {count} pages)"
        return True

    def put_front(self, slot: int, spare: int) -> bool:
        """Hold all pages before the slot's first one too; True, or False and no change.  spare: pages that must still
        be free afterwards."""
        count = int(self.base[slot])
        if count + spare > self.free:
            return False
        behind = self.table[slot, : self.held[slot]].copy()
        self.held[slot] = self.base[slot] = 0
        self._hold(slot, count)
        self._seat(slot, behind)
        self._last = f"put_front(slot {slot}, {count} pages)"
        return True

    # --- pages without a slot -------------------------------------------------------------------------------------

    def claim(self, count: int, spare: int = 0) -> Pages | None:
        """Park `count` free pages for somebody who will come; None and no change when fewer than that + `spare` are
        free."""
        if count + spare > self.free:
            return None
        self._unheld -= count
        self.parked += count
        self._last = f"claim({count} pages)"
        return self._stack[self._unheld : self._unheld + count][::-1].copy()

    def release(self, parked: Pages) -> None:
        """Give parked pages back."""
        self.parked -= len(parked)
        self._push(parked)
        self._last = f"release({len(parked)} pages)"

    def trade(self, given: Pages, taken: Pages) -> None:
        """Exchange parked pages with another pool of the node, as many for as many: `given` are no longer ours, `taken`
        are, and parked."""
        if len(given) != len(taken) or len(given) > self.parked:
            raise PageError(f"{len(given)} of {self.parked} parked pages cannot be traded for {len(taken)}")
        self._last = f"trade({len(given)} pages)"

    def check(self) -> None:
        """Raise PageError unless free + held + reserved + parked = pool and no page has two holders (law 4)."""
        held = int(self.held.sum())
        reserved = int(self.reserved.sum())
        total = self.free + held + reserved + self.parked
        if reserved != self._reserved or self.free < 0 or total != self.pages:
            raise PageError(
                f"free {self.free} + held {held} + reserved {reserved} + parked {self.parked} = {total}, "
                f"pool has {self.pages}; last change: {self._last}"
            )
        if ((self.borrowed > 0) & (self.base > 0)).any():
            raise PageError(f"a slot borrows pages behind some that lie elsewhere; last change: {self._last}")
        own = np.arange(self.table.shape[1]) >= self.borrowed[:, None]
        named = self.table[own & (self.table >= 0)]
        everyone = np.concatenate((named, self._stack[: self._unheld]))
        if len(named) != held or len(np.unique(everyone)) != self.pages - self.parked:
            raise PageError(f"a page has two holders or none; last change: {self._last}")

    # --- inside ---------------------------------------------------------------------------------------------------

    def _hold(self, slot: int, count: int) -> None:
        self._unheld -= count
        self._seat(slot, self._stack[self._unheld : self._unheld + count][::-1])

    def _first(self, slots: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the ordinal of the first page that each slot holds."""
        first: NDArray[np.int32] = self.base[slots] + self.borrowed[slots]
        return first

    def _seat(self, slot: int, pages: Pages) -> None:
        self._write(slot, int(self.borrowed[slot] + self.held[slot]), pages)
        self.held[slot] += len(pages)

    def _write(self, slot: int, start: int, pages: Pages) -> None:
        while start + len(pages) > self.table.shape[1]:
            self.table = np.concatenate((self.table, np.full_like(self.table, -1)), axis=1)
        self.table[slot, start : start + len(pages)] = pages

    def _lift(self, slot: int) -> Pages:
        lent, count = int(self.borrowed[slot]), int(self.held[slot])
        pages = self.table[slot, lent : lent + count].copy()
        self.table[slot, : lent + count] = -1
        self._reserved -= int(self.reserved[slot])
        self.held[slot] = self.reserved[slot] = self.base[slot] = self.borrowed[slot] = 0
        return pages

    def _push(self, pages: Pages) -> None:
        self._stack[self._unheld : self._unheld + len(pages)] = pages[::-1]
        self._unheld += len(pages)
