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
from bgmpi.shared_prefixes import NO_ONE, Prefix, SharedPrefixes
from bgmpi.transcript import Transcript, TranscriptParcel, pack, unpack
from bgmpi.world import World, decode, encode

_LOG = logging.getLogger("bgmpi.migration")


class PrefixParcel(msgspec.Struct, frozen=True, eq=False):
    """The KV of a prefix on its way: its full pages beside its parent's, and its tail (-1: none), as the source names
    them."""

    number: int
    pages: Pages
    tail: int


class Parcel(msgspec.Struct, frozen=True, eq=False):
    """A sequence on its way: the fields of an `Entry` with its home pages as the source names them, its transcript, and
    the prefixes behind which its KV goes on, shallow before deep."""

    sequence: int
    tokens: NDArray[np.int32]
    prompt: int
    most: int
    with_kv: int
    started: bool
    pages: Pages
    transcript: TranscriptParcel
    level: int
    prefixes: tuple[Prefix, ...]
    behind: tuple[PrefixParcel, ...]


class Taken(msgspec.Struct, frozen=True, eq=False):
    """A target's acknowledgement of a sequence; pages: those it gives for the ones that it took over without a copy."""

    sequence: int
    pages: Pages


@dataclass(frozen=True, slots=True)
class Migrated:
    """What came to this rank: sequences int64 [k], and the bytes that were copied for them."""

    arrived: Ids
    bytes: int


def parcel_of(entry: Entry, transcript: Transcript, prefixes: SharedPrefixes) -> Parcel:
    """Return what another rank must know of a sequence."""
    behind = tuple(PrefixParcel(number, *prefixes.own_pages(number)) for number in prefixes.behind(entry.sequence))
    return Parcel(
        entry.sequence, entry.tokens, entry.prompt, entry.most, entry.with_kv, entry.started, entry.home,
        pack(transcript), entry.level, entry.prefixes, behind,
    )  # fmt: skip


def entry_of(parcel: Parcel, pages: Pages) -> Entry:
    """Return the sequence of a parcel, its KV in `pages` of this rank."""
    return Entry(
        parcel.sequence, parcel.tokens, parcel.prompt, parcel.most, parcel.with_kv, pages, started=parcel.started,
        level=parcel.level, prefixes=parcel.prefixes,
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
                parcel_of(entry, live[entry.sequence], manager.prefixes) for entry in manager.leave(order.sequences)
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
    copied = 0
    for parcel in parcels:
        spare = manager.kv.growing(manager.active)
        pages = manager.kv.claim(len(parcel.pages), spare) if manager.takes(parcel.most) else None
        if pages is None:
            continue
        came = _bring_prefixes(parcel, source, store, manager)
        if came is None:
            manager.kv.release(pages)
            continue
        copied += came
        claimed.append((parcel, pages))
    if not claimed:
        return [], copied
    if store.same_node(source):
        for parcel, pages in claimed:
            manager.kv.trade(given=pages, taken=parcel.pages)
        return [(parcel, entry_of(parcel, parcel.pages), pages) for parcel, pages in claimed], copied
    theirs = np.concatenate([parcel.pages for parcel, _ in claimed]).astype(np.int64)
    mine = np.concatenate([pages for _, pages in claimed]).astype(np.int64)
    try:
        store.fetch(source, theirs, mine).wait()
    except BgmpiError as error:
        _LOG.warning("%d sequences of rank %d stay there: %s", len(claimed), source, error)
        for parcel, pages in claimed:
            manager.kv.release(pages)
            manager.prefixes.leave(parcel.sequence)
        return [], copied
    nothing = np.empty(0, np.int32)
    copied += len(mine) * store.page_bytes
    return [(parcel, entry_of(parcel, pages), nothing) for parcel, pages in claimed], copied


def _bring_prefixes(parcel: Parcel, source: int, store: HostStore, manager: SequenceManager) -> int | None:
    """Let this rank have the prefixes behind which a sequence's KV goes on, those it lacks copied from `source`, and
    the sequence be one of their members; -> bytes copied, None and no change where that cannot be."""
    prefixes, kv, copied = manager.prefixes, manager.kv, 0
    prefixes.enter(parcel.sequence, parcel.prefixes, told=False)
    for one in parcel.behind:
        if prefixes.has(one.number):
            if not prefixes.is_of(one.number, parcel.tokens):
                break
            continue
        theirs = np.append(one.pages, np.array([one.tail] * (one.tail != NO_ONE), np.int32)).astype(np.int64)
        mine = kv.claim(len(theirs), kv.growing(manager.active))
        if mine is None:
            break
        try:
            store.fetch(source, theirs, mine.astype(np.int64)).wait()
        except BgmpiError as error:
            _LOG.warning("sequence %d stays at rank %d: %s", parcel.sequence, source, error)
            kv.release(mine)
            break
        full = len(one.pages)
        prefixes.install(one.number, parcel.tokens, mine[:full], int(mine[full]) if one.tail != NO_ONE else NO_ONE)
        copied += len(theirs) * store.page_bytes
    else:
        if parcel.behind:
            prefixes.link(parcel.sequence, parcel.behind[-1].number)
        return copied
    prefixes.leave(parcel.sequence)
    return None
