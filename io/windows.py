"""One window over the world: memory of this rank that others read without its help (MIGRATE, paper A3).

Each rank brings one segment of bytes.  On a node the segments lie behind each other in memory that all its ranks see,
so there is a second way in: the node's block as one array, read and written in place, no copy.  Ranks of other nodes
read by one-sided gets, which name bytes in the block of a rank's node.  What lies where is the caller's (host_store).

Whether the segments do form one block is MPI's choice, so it is looked at (`Shared_query`) and agreed on by the node;
where they do not, the block is this rank's own segment and its neighbours count as other nodes.

Gets are Rget, joined to as few as there are gaps: measured equal to Get + Flush from 64 KB a piece (within a node and
between nodes) and 1.4 times slower at 4 KB, but only a request can be asked whether it has ended.  Rejected: one get
of an indexed datatype, 3 times slower between nodes.  Memory is not touched at the start: who computes on a page first
is its owner, so it comes from the owner's part of the machine, and a job takes what it uses.

No name is left that a second job could meet, nor memory when a job is killed: MPICH was seen to unlink the file behind
a window as soon as all ranks of the node have it.

Invariant: no byte of another rank's segment is touched outside of what it allocated.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from bgmpi.errors import BgmpiError, InternalError
from bgmpi.world import World

#: Segments are whole pages of the system, so that neighbours touch and files can be read straight into them.
GRAIN = 4096

_LOG = logging.getLogger("bgmpi.windows")


class Copies:
    """The receipt of one-sided copies: their requests, and the arrays that they fill."""

    def __init__(self, requests: list[Any], *filled: Any) -> None:
        self._requests = requests
        self._filled = filled

    def done(self) -> bool:
        """Say whether the copies have ended.  Local, never blocks."""
        if self._requests and type(self._requests[0]).Testall(self._requests):
            self._requests = []
        return not self._requests

    def wait(self) -> None:
        """Return once the copies have ended.  Local."""
        if self._requests:
            type(self._requests[0]).Waitall(self._requests)
            self._requests = []


class Window:
    """A segment of `size` bytes on every rank.

    own: uint8 [size], this rank's segment, aligned to a page of the system.
    node: uint8, the block: the segments of the node's ranks in their order, or `own` where they do not touch.
    node_offset: bytes of `node` before `own`.  sizes: int64 [ranks], bytes of each rank's segment.
    """

    def __init__(self, world: World, size: int) -> None:
        """Collective over the world.  size: bytes, a multiple of GRAIN, equal on all ranks of a node."""
        if size < 1 or size % GRAIN:
            raise InternalError(f"a window of {size} bytes: expected a positive multiple of {GRAIN}")
        alone = world.node_size == 1
        # Alone on its node, a rank gets memory of any alignment.
        self._raw = world.allocate(size + GRAIN if alone else size)
        segment = np.frombuffer(self._raw.tomemory(), np.uint8)
        skip = -_address(segment) % GRAIN if alone else 0
        self.own: NDArray[np.uint8] = segment[skip : skip + size]
        node = _node_block(world, self._raw, size) if not alone else self.own
        everyone = world.all_gather_counts(np.array([size, skip, node is not None], np.int64))
        self.sizes: NDArray[np.int64] = everyone[:, 0].copy()
        self._skips: list[int] = everyone[:, 1].tolist()
        mates = [np.flatnonzero(world.node_of == first) for first in world.node_of]
        self._blocks = [all_of if everyone[all_of, 2].all() else np.array([r]) for r, all_of in enumerate(mates)]
        self._mine = self._blocks[world.rank]
        joined = node is not None and len(self._mine) == world.node_size
        self.node: NDArray[np.uint8] = node if node is not None and joined else self.own
        self.node_offset = world.node_rank * size if joined else 0
        if not joined:
            _LOG.warning("this MPI does not lay a node's segments behind each other: KV is copied between its ranks")
        _ask_for_huge_pages(self.node)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        # Freeing is collective: with an error that not all ranks have, the world ends them, and nobody may wait here.
        if error is None or (isinstance(error, BgmpiError) and error.agreed):
            self.close()

    def same_node(self, rank: int) -> bool:
        """Say whether `node` holds the segment of that rank."""
        return rank in self._mine

    def block_bytes(self, rank: int) -> int:
        """Return the bytes of the block of that rank's node."""
        return len(self._blocks[rank]) * int(self.sizes[rank])

    def get(
        self, rank: int, offsets: NDArray[np.int64], size: int, target: NDArray[np.uint8],
        target_offsets: NDArray[np.int64],
    ) -> Copies:  # fmt: skip
        """Begin to copy k pieces of `size` bytes: from offsets[i], bytes in the block of that rank's node, to
        target[target_offsets[i]:].  One-sided: no other rank does anything.  A piece lies within one segment; target is
        uint8 and contiguous, pieces do not overlap there, and it may not be read before the receipt's `wait`."""
        if not len(self.own):
            raise InternalError("a get from a window that is closed")
        owners, segment = self._blocks[rank], int(self.sizes[rank])
        _check_pieces(f"the block of rank {rank}'s node", offsets, size, self.block_bytes(rank))
        _check_pieces("the target", target_offsets, size, len(target))
        requests = []
        rget, memory = self._raw.Rget, target.data
        for source, begin, length in zip(*_joined(offsets, target_offsets, size, segment), strict=True):
            owner = int(owners[source // segment])
            requests.append(rget(memory[begin : begin + length], owner, self._skips[owner] + source % segment))
        return Copies(requests, target)

    def sync(self) -> None:
        """Let what this rank wrote into the block be seen by gets of others that come behind a later collective."""
        self._raw.Sync()

    def close(self) -> None:
        """Collective over the world: free the memory.  No array or tensor over it may be touched afterwards."""
        if len(self.own):
            self.own = self.node = np.empty(0, np.uint8)
            self._raw.Unlock_all()
            self._raw.Free()


def _address(array: NDArray[np.uint8]) -> int:
    return int(array.ctypes.data)


def _node_block(world: World, raw: Any, size: int) -> NDArray[np.uint8] | None:
    """Return the segments of this node's ranks as one array, None when they do not lie behind each other."""
    addresses = []
    for rank in np.flatnonzero(world.node_of == world.node_of[world.rank]).tolist():
        try:
            memory, _ = raw.Shared_query(rank)
        except RuntimeError as error:  # mpi4py's own is one; windows of Allocate can be queried since MPI 4.1
            _LOG.debug("Shared_query: %s", error)
            return None
        segment = np.frombuffer(memory, np.uint8)
        if len(segment) != size:
            return None
        addresses.append(_address(segment))
    if any(address != addresses[0] + i * size for i, address in enumerate(addresses)):
        return None
    whole = ctypes.c_uint8 * (len(addresses) * size)
    block: NDArray[np.uint8] = np.ctypeslib.as_array(whole.from_address(addresses[0]))
    return block


def _ask_for_huge_pages(block: NDArray[np.uint8]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    begin = -(-_address(block) // GRAIN) * GRAIN
    length = (_address(block) + len(block) - begin) // GRAIN * GRAIN
    if libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE):
        _LOG.debug("no huge pages for %d bytes: %s", length, os.strerror(ctypes.get_errno()))


def _check_pieces(where: str, offsets: NDArray[np.int64], size: int, room: int) -> None:
    if len(offsets) and (offsets.min() < 0 or offsets.max() + size > room):
        raise InternalError(
            f"{len(offsets)} pieces of {size} bytes from {offsets.min()} to {offsets.max()} are not in {where}, "
            f"{room} bytes"
        )


def _joined(
    offsets: NDArray[np.int64], targets: NDArray[np.int64], size: int, segment: int
) -> tuple[list[int], list[int], list[int]]:
    """Return source, target and length of as few pieces as hold the same bytes, each within one segment."""
    if len(offsets) != len(targets):
        raise InternalError(f"{len(offsets)} pieces to copy to {len(targets)} places")
    order = np.argsort(offsets)
    source, target = offsets[order], targets[order]
    new = np.ones(len(order), bool)
    new[1:] = (np.diff(source) != size) | (np.diff(target) != size) | (source[1:] % segment == 0)
    begins = np.flatnonzero(new)
    counts = np.diff(begins, append=len(order))
    return source[begins].tolist(), target[begins].tolist(), (counts * size).tolist()
