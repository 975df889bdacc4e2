"""A rank's KV on its way to disk when the job stops, and back when it goes on (`--checkpoint-kv`).

What is saved is what lies at home, whole pages, of sequences that this rank alone computes; KV on the disk tier or
split over a group is computed again.  Restoring is like the arrival of a migrated sequence: pages are claimed, filled,
and only then does an entry name them; where anything is missing the sequence is one without KV, and nothing is lost.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bgmpi.backlog import Entry
from bgmpi.io.durable import remove_if_there
from bgmpi.io.host_store import HostStore
from bgmpi.io.kv_checkpoint import KvToSave, hash_of, kv_path, load_kv, save_kv
from bgmpi.request import SavedKv
from bgmpi.sequence_manager import SequenceManager
from bgmpi.transcript import Transcript
from bgmpi.world import World

_LOG = logging.getLogger("bgmpi.saved_kv")


class KvSource(Protocol):
    """A rank as it is seen from here."""

    world: World
    store: HostStore
    manager: SequenceManager
    live: dict[int, Transcript]

    def at_home(self) -> NDArray[np.int64]:
        """Bring all KV of the active sequences that this rank alone computes home; -> their slots, int64 [k]."""

    @property
    def prefill_rate(self) -> float:
        """Tokens a second in steps of prefill, NaN before there was any."""


@dataclass(slots=True)
class KvCheckpoint:
    """Writes a rank's KV when it is wanted, each file in the place of the one before.

    wanted: off, stop or always; attempt: its number; facts: what KV depends on beside tokens.
    """

    wanted: str
    folder: Path
    attempt: int
    facts: str
    written: Path | None = None

    def save(self, rank: KvSource, *, last: bool) -> None:
        """Write it where it is wanted now.  Local.  last: the job stops here.  Raises WriteError."""
        if self.wanted == "off" or (self.wanted == "stop" and not last):
            return
        path = kv_path(self.folder, self.attempt, rank.world.rank)
        begun = time.perf_counter()
        size = save(
            path, self.facts, manager=rank.manager, store=rank.store, live=rank.live, slots=rank.at_home(),
            prefill_rate=rank.prefill_rate,
        )  # fmt: skip
        _LOG.info("saved %.1f MB of KV in %.2f s", size / 1e6, time.perf_counter() - begun)
        if self.written is not None:
            remove_if_there(self.written)
        self.written = path if size else None


def save(
    path: Path, facts: str, *, manager: SequenceManager, store: HostStore, live: dict[int, Transcript],
    slots: NDArray[np.int64], prefill_rate: float,
) -> int:  # fmt: skip
    """Write the KV of these active slots, which must be at home, and of the backlog; -> bytes.  Local.

    facts: what KV depends on beside tokens; prefill_rate: tokens a second, NaN when unknown.  Raises WriteError.
    """
    active, kv = manager.active_set, manager.kv
    found = []
    for slot in slots[kv.base[slots] == 0].tolist():
        with_kv = int(active.with_kv[slot])
        tokens = active.tokens[slot, :with_kv]
        found.append((int(active.sequence[slot]), tokens, kv.table[slot, : kv.pages_for(with_kv)]))
    for entry in manager.backlog:
        if not len(entry.disk):
            pages = np.concatenate((manager.prefixes.borrowed_by(entry.sequence), entry.home))
            found.append((entry.sequence, entry.tokens[: entry.with_kv], pages))
    chosen = [
        KvToSave(live[name].request.row, live[name].sample, tokens.copy(), pages.astype(np.int64))
        for name, tokens, pages in found
        if len(tokens)
    ]
    return save_kv(path, facts, chosen, store.tensor, prefill_rate) if chosen else 0


def restore(entry: Entry, saved: SavedKv, *, manager: SequenceManager, store: HostStore) -> Entry:
    """Return the entry with its KV read from disk, or as it was where that cannot be.  Local.

    What it shares is read once: behind a prefix that is here only the rest is read, and prefixes that are not here yet
    take the pages of the first that brings them.
    """
    if saved.with_kv >= len(entry.tokens) or hash_of(entry.tokens[: saved.with_kv]) != saved.tokens:
        return entry
    kv, prefixes = manager.kv, manager.prefixes
    if saved.pages != kv.pages_for(saved.with_kv):
        return entry
    link = prefixes.reach(entry.sequence, entry.tokens, saved.with_kv)
    borrowed = len(prefixes.pages_of(link))
    pages = kv.claim(saved.pages - borrowed, kv.growing(manager.active))
    if pages is None:
        return entry
    if not load_kv(saved, store.tensor, pages.astype(np.int64), skip=borrowed):
        kv.release(pages)
        return entry
    taken = prefixes.adopt(entry.sequence, entry.tokens, saved.with_kv, pages)
    return replace(entry, with_kv=saved.with_kv, home=pages[taken:])
