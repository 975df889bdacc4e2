"""The sequences of a rank that are not active: waiting, yielded, held by order, or about to leave.

A sequence is in one of three places.  The queue refills the active set, strictly oldest first; who is more urgent
counts as older (`fairness.age_key`).  The hold keeps those that rank 0 ordered to YIELD until it orders to COMBINE or
MIGRATE them.  Leaving are those whose copy is under way: they are still owned here until the target has acknowledged
(design law 3), and go back to the queue if it does not.

Pure bookkeeping over entries; it knows no pages but the numbers that an entry carries.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from bgmpi.errors import InternalError
from bgmpi.paged_kv import Pages
from bgmpi.shared_prefixes import Prefix

NO_PAGES: Pages = np.empty(0, np.int32)
NO_PAGES.flags.writeable = False


@dataclass(frozen=True, slots=True)
class Entry:
    """A sequence that is not active.

    tokens: int32 [known], the prompt and what was generated; prompt: tokens of the prompt; most: the longest the
    sequence may become, tokens.  with_kv: tokens whose KV it kept: first in the pages `disk`, then in the pages `home`
    (parked page numbers, int32).  started: it was active before.  level: how urgent it is, from 0, the most urgent
    (`fairness.Turns`).  prefixes: what its prompt shares with others, shallow before deep; the pages of such a prefix
    that it borrows are not among `home`.
    """

    sequence: int
    tokens: NDArray[np.int32]
    prompt: int
    most: int
    with_kv: int = 0
    home: Pages = field(default_factory=lambda: NO_PAGES)
    disk: Pages = field(default_factory=lambda: NO_PAGES)
    started: bool = False
    level: int = 0
    prefixes: tuple[Prefix, ...] = ()

    def without_kv(self) -> Entry:
        """Return it as one that must compute its KV again."""
        return replace(self, with_kv=0, home=NO_PAGES, disk=NO_PAGES)


class Backlog:
    """All that is not active on a rank, each entry with its order (smaller is older)."""

    def __init__(self) -> None:
        self._queue: list[tuple[int, Entry]] = []
        self._held: dict[int, tuple[int, Entry]] = {}
        self._leaving: dict[int, tuple[int, Entry]] = {}

    def __len__(self) -> int:
        """Sequences in the queue."""
        return len(self._queue)

    def __iter__(self) -> Iterator[Entry]:
        """Yield the entries of all three places."""
        for _, entry in (*self._queue, *self._held.values(), *self._leaving.values()):
            yield entry

    def queued(self) -> Iterator[Entry]:
        """Yield the entries of the queue, in no order."""
        for _, entry in self._queue:
            yield entry

    def first(self) -> tuple[int, Entry]:
        """Return the oldest of the queue, which stays there."""
        return self._queue[0]

    def push(self, order: int, entry: Entry) -> None:
        """Queue an entry at its place."""
        heapq.heappush(self._queue, (order, entry))

    def pop(self) -> tuple[int, Entry]:
        """Take the oldest of the queue."""
        return heapq.heappop(self._queue)

    def hold(self, order: int, entry: Entry) -> None:
        """Keep an entry until it is named."""
        self._held[entry.sequence] = order, entry

    def combine(self, sequences: NDArray[np.int64]) -> None:
        """Queue held entries again."""
        for sequence in sequences.tolist():
            if sequence not in self._held:
                raise InternalError(f"sequence {sequence} should run again and is not held here")
            self.push(*self._held.pop(sequence))

    def leave(self, sequences: NDArray[np.int64]) -> list[Entry]:
        """Let held or queued entries begin to leave; -> them, in the order named."""
        wanted = set(sequences.tolist())
        going = {entry.sequence: (order, entry) for order, entry in self._queue if entry.sequence in wanted}
        if going:
            self._queue = [item for item in self._queue if item[1].sequence not in going]
            heapq.heapify(self._queue)
        going |= {sequence: self._held.pop(sequence) for sequence in wanted & self._held.keys()}
        if len(going) != len(sequences):
            raise InternalError(f"sequences {sorted(wanted - going.keys())} should leave and do not wait here")
        self._leaving |= going
        return [going[sequence][1] for sequence in sequences.tolist()]

    def strip_leaving(self, sequence: int) -> Entry:
        """Take the KV off a leaving entry; -> the entry as it is then."""
        order, entry = self._leaving[sequence]
        self._leaving[sequence] = order, entry.without_kv()
        return self._leaving[sequence][1]

    def stay(self, sequence: int) -> Entry:
        """Queue a leaving entry again at its old place; -> it."""
        order, entry = self._leaving.pop(sequence)
        self.push(order, entry)
        return entry

    def gone(self, sequence: int) -> Entry:
        """Forget a leaving entry; -> it."""
        return self._leaving.pop(sequence)[1]

    def strip_newest(self) -> Entry | None:
        """Take the KV off the youngest queued or held entry that has any; -> the entry as it was, None when none
        has."""
        queued = [(order, place) for place, (order, entry) in enumerate(self._queue) if entry.with_kv]
        held = [(order, entry.sequence) for order, entry in self._held.values() if entry.with_kv]
        if not queued and not held:
            return None
        if held and (not queued or max(held) > max(queued)):
            sequence = max(held)[1]
            order, entry = self._held[sequence]
            self._held[sequence] = order, entry.without_kv()
            return entry
        place = max(queued)[1]
        order, entry = self._queue[place]
        # The order stays, so the heap does too.
        self._queue[place] = order, entry.without_kv()
        return entry
