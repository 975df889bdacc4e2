"""MIGRATE: suspended sequences change their rank, with their KV (paper A3), in one round and all at once.

Four beats, collective over the world.  The sources hand out parcels: what a sequence is, and the numbers of its pages.
The targets claim pages and get the bytes themselves, one-sided, out of the sources' windows; within a node nothing is
copied, the pages change their owner, against as many free ones so that pools keep their size.  The targets acknowledge.
Only then does a source let go (law 3): until the acknowledgement the source owns the sequence and everything about it
is still there, so a copy that fails or finds no room changes nothing.

Rejected: lone sends between pairs of ranks (law 2), and going through rank 0 in several rounds, which takes seconds.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from bgmpi.backlog import Entry
from bgmpi.errors import BgmpiError
from bgmpi.io.host_store import HostStore
from bgmpi.io.tokenizer import Tokenizer
from bgmpi.paged_kv import Pages
from bgmpi.primitives import Ids, Migrate
from bgmpi.sequence_manager import SequenceManager
from bgmpi.transcript import Transcript, TranscriptParcel, pack, unpack
from bgmpi.world import World, decode, encode

_LOG = logging.getLogger("bgmpi.migration")


class Parcel(msgspec.Struct, frozen=True, eq=False):
    """A sequence on its way: the fields of an `Entry` with its home pages as the source names them, and its
    transcript."""

    sequence: int
    tokens: NDArray[np.int32]
    prompt: int
    most: int
    with_kv: int
    started: bool
    pages: Pages
    transcript: TranscriptParcel
    level: int


class Taken(msgspec.Struct, frozen=True, eq=False):
    """A target's acknowledgement of a sequence; pages: those it gives for the ones that it took over without a copy."""

    sequence: int
    pages: Pages


@dataclass(frozen=True, slots=True)
class Migrated:
    """What came to this rank: sequences int64 [k], and the bytes that were copied for them."""

    arrived: Ids
    bytes: int


def parcel_of(entry: Entry, transcript: Transcript) -> Parcel:
    """Return what another rank must know of a sequence."""
    return Parcel(
        entry.sequence, entry.tokens, entry.prompt, entry.most, entry.with_kv, entry.started, entry.home,
        pack(transcript), entry.level,
    )  # fmt: skip


def entry_of(parcel: Parcel, pages: Pages) -> Entry:
    """Return the sequence of a parcel, its KV in `pages` of this rank."""
    return Entry(
        parcel.sequence, parcel.tokens, parcel.prompt, parcel.most, parcel.with_kv, pages, started=parcel.started,
        level=parcel.level,
    )  # fmt: skip


def migrate(
    orders: list[Migrate],
    *,
    world: World,
    store: HostStore,
    manager: SequenceManager,
    live: dict[int, Transcript],
    tokenizer: Tokenizer,
) -> Migrated:
    """Collective over the world: carry out a round's migrations.  Every rank passes the same `orders`."""
    outgoing: list[list[Parcel]] = [[] for _ in range(world.size)]
    for order in orders:
        if order.source == world.rank:
            outgoing[order.target] += [
                parcel_of(entry, live[entry.sequence]) for entry in manager.leave(order.sequences)
            ]
    store.sync()
    incoming = [decode(data, list[Parcel]) for data in world.exchange([encode(parcels) for parcels in outgoing])]
    taken, arrived, moved = [], [], 0
    for source, parcels in enumerate(incoming):
        accepted, copied = _receive(parcels, source, store, manager)
        for parcel, entry, _ in accepted:
            live[parcel.sequence] = unpack(parcel.transcript, tokenizer, parcel.tokens[parcel.prompt :])
            manager.arrive(entry)
            arrived.append(parcel.sequence)
        taken.append([Taken(parcel.sequence, given) for parcel, _, given in accepted])
        moved += copied
    answers = world.exchange([encode(one) for one in taken])
    done = {one.sequence: one.pages for data in answers for one in decode(data, list[Taken])}
    for parcels in outgoing:
        for parcel in parcels:
            if parcel.sequence in done:
                manager.gone(parcel.sequence, done[parcel.sequence])
                del live[parcel.sequence]
            else:
                manager.stay(parcel.sequence)
    return Migrated(np.array(arrived, np.int64), moved)


def _receive(
    parcels: list[Parcel], source: int, store: HostStore, manager: SequenceManager
) -> tuple[list[tuple[Parcel, Entry, Pages]], int]:
    """Claim pages for what `source` offers and get its bytes -> the parcels taken, each with its new entry and the
    pages given for it, and the bytes copied."""
    claimed: list[tuple[Parcel, Pages]] = []
    for parcel in parcels:
        spare = manager.kv.growing(manager.active)
        pages = manager.kv.claim(len(parcel.pages), spare) if manager.takes(parcel.most) else None
        if pages is not None:
            claimed.append((parcel, pages))
    if not claimed:
        return [], 0
    if store.same_node(source):
        for parcel, pages in claimed:
            manager.kv.trade(given=pages, taken=parcel.pages)
        return [(parcel, entry_of(parcel, parcel.pages), pages) for parcel, pages in claimed], 0
    theirs = np.concatenate([parcel.pages for parcel, _ in claimed]).astype(np.int64)
    mine = np.concatenate([pages for _, pages in claimed]).astype(np.int64)
    try:
        store.fetch(source, theirs, mine).wait()
    except BgmpiError as error:
        _LOG.warning("%d sequences of rank %d stay there: %s", len(claimed), source, error)
        for _, pages in claimed:
            manager.kv.release(pages)
        return [], 0
    nothing = np.empty(0, np.int32)
    return [(parcel, entry_of(parcel, pages), nothing) for parcel, pages in claimed], len(mine) * store.page_bytes
