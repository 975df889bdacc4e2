"""PARTITION: the ranks of a group compute one last sequence together, and stop doing so (paper A3, A6).

The leader owns the sequence: it alone draws, listens, records and answers.  The others follow with a copy of its
position and the KV of their own heads, in pages of their own; they plan the same steps, because a step depends on
nothing but the sequence, and take over what the leader drew.  If any member has no room the sequence stays with its
leader alone, whose KV was never touched.

When a group ends while the sequence goes on (a larger one may follow), the leader first gets the KV that the others
computed for their heads since, then they let go (law 3).

It knows ranks, pages and positions; which heads are whose is the shard's (`bgmpi.shard`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bgmpi.backlog import Entry
from bgmpi.errors import BgmpiError
from bgmpi.group import Group
from bgmpi.io.host_store import HostStore
from bgmpi.paged_kv import Pages
from bgmpi.primitives import Partition
from bgmpi.sequence_manager import SequenceManager
from bgmpi.world import decode, encode

_LOG = logging.getLogger("bgmpi.partition")

Heads = Callable[[int], slice | None]


@dataclass(frozen=True, slots=True)
class Sharded:
    """A sequence that this rank computes with others.

    leader: its owner's place in the group; since: its tokens with KV when the group began; heads(member): the KV heads
    that a member keeps, None where all keep everything.
    """

    sequence: int
    group: Group
    leader: int
    since: int
    heads: Heads

    @property
    def leads(self) -> bool:
        """Whether this rank owns the sequence."""
        return self.group.rank == self.leader


@dataclass(frozen=True, slots=True)
class Position:
    """What the followers must know of a sequence; pages: its home pages as the leader names them.  most 0: the leader
    cannot share it now."""

    sequence: int
    tokens: NDArray[np.int32]
    prompt: int
    most: int
    with_kv: int
    pages: Pages


NOWHERE = Position(-1, np.empty(0, np.int32), 0, 0, 0, np.empty(0, np.int32))


def shard(
    order: Partition, group: Group, heads: Heads, store: HostStore, manager: SequenceManager, *, willing: bool = True
) -> Sharded | None:
    """Collective over the group: share the sequence of `order`, whose KV is at its leader's home.

    willing: whether this rank would lead it now.  -> what every member must remember; None on every member when the
    leader cannot share it or another one has no room, and nothing has changed.
    """
    leader = order.leader - group.first
    leads = group.rank == leader
    store.sync()
    may = leads and willing and _may_lead(order.sequence, manager)
    position = _spread(group, leader, _position(manager, order.sequence) if may else NOWHERE)
    fits = may
    if not leads and position.most:
        fits = _follow(position, store, order.leader, heads(group.rank), manager)
    if not group.all_gather_counts(np.array([fits], np.int64)).all():
        why = "a rank has no room for its KV" if position.most else f"rank {order.leader} cannot share it now"
        _LOG.warning("sequence %d does not run over ranks [%d, %d): %s", order.sequence, order.first,
                     order.first + order.size, why)
        if not leads and fits:
            manager.forget(order.sequence)
        return None
    return Sharded(order.sequence, group, leader, position.with_kv, heads)


def unshard(sharded: Sharded, store: HostStore, manager: SequenceManager) -> int:
    """Collective over the group: end it; the leader has all KV at home again, the others drop theirs -> bytes that this
    rank got."""
    group, heads = sharded.group, sharded.heads
    slot = int(manager.active_set.slots_of(np.array([sharded.sequence], np.int64))[0])
    kv = manager.kv
    mine = kv.row(slot).astype(np.int64)
    everyone = np.empty((group.size, len(mine)), np.int64)
    store.sync()
    counts = np.full(group.size, mine.nbytes, np.int64)
    group.all_gather_bytes(mine.view(np.uint8), counts, everyone.reshape(-1).view(np.uint8))
    moved = 0
    if sharded.leads:
        first = sharded.since // kv.page_tokens
        for member in range(group.size):
            kept = heads(member)
            if member != group.rank and kept is not None:
                store.fetch_heads(group.first + member, everyone[member, first:], mine[first:], kept).wait()
                moved += len(mine[first:]) * store.page_bytes // group.size
    group.all_gather_counts(np.array([1], np.int64))
    return moved


def _may_lead(sequence: int, manager: SequenceManager) -> bool:
    """Say whether the sequence is all that this rank has, its KV at home."""
    slots = manager.active
    alone = len(slots) == 1 and manager.active_set.sequence[slots[0]] == sequence and not manager.backlog
    return bool(alone and not manager.places.spills(slots)[0])


def _position(manager: SequenceManager, sequence: int) -> Position:
    active = manager.active_set
    slot = int(active.slots_of(np.array([sequence], np.int64))[0])
    tokens, with_kv = active.tokens[slot, : active.known[slot]].copy(), int(active.with_kv[slot])
    pages = manager.kv.table[slot, : manager.kv.pages_for(with_kv)].copy()
    return Position(sequence, tokens, int(active.prompt[slot]), int(active.most[slot]), with_kv, pages)


def _spread(group: Group, leader: int, position: Position) -> Position:
    """Collective over the group: the leader's position reaches every member, whatever the others bring."""
    data = encode(position)
    size = int(group.all_gather_counts(np.array([len(data)], np.int64))[leader, 0])
    buffer = np.frombuffer(bytearray(data), np.uint8) if group.rank == leader else np.empty(size, np.uint8)
    group.broadcast_bytes(buffer, leader)
    return decode(buffer.tobytes(), Position)


def _follow(position: Position, store: HostStore, leader: int, heads: slice | None, manager: SequenceManager) -> bool:
    """Make the sequence active here with a copy of its KV; False, and no change, when there is no room."""
    pages = manager.kv.claim(len(position.pages)) if manager.takes(position.most) else None
    if pages is None:
        return False
    entry = Entry(position.sequence, position.tokens, position.prompt, position.most, position.with_kv, pages,
                  started=True)
    if not manager.follow(entry):
        manager.kv.release(pages)
        return False
    theirs, mine = position.pages.astype(np.int64), pages.astype(np.int64)
    try:
        receipt = store.fetch(leader, theirs, mine) if heads is None else store.fetch_heads(leader, theirs, mine, heads)
        receipt.wait()
    except BgmpiError as error:
        _LOG.warning("the KV of sequence %d did not come from rank %d: %s", position.sequence, leader, error)
        manager.forget(position.sequence)
        return False
    return True
