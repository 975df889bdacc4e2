"""A few neighbouring ranks that compute one sequence together (PARTITION, paper A3).

Results of shards are gathered in rank order and what the leader drew is spread; that is all a group ever says, so that
is all there is here.  The communicators exist from start-up (`World.groups`): making one in the tail would itself be a
collective of the whole world.  It takes the communicator by its few calls and knows neither weights nor sequences.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bgmpi.pulse import Pulse


class Group:
    """Ranks [first, first + size) of the world.  rank: this rank's place inside, from 0."""

    def __init__(self, comm: Any, first: int, pulse: Pulse) -> None:
        """comm: an mpi4py communicator over exactly these ranks, in their order; pulse: told when this rank waits."""
        self._comm = comm
        self._pulse = pulse
        self.first = first
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()

    def all_gather_bytes(
        self, send: NDArray[np.uint8], counts: NDArray[np.int64], receive: NDArray[np.uint8]
    ) -> None:
        """Collective over the group.  Each member's bytes reach all: counts int64 [size], what each member sends (0
        allowed); receive uint8 [sum of counts], the members' pieces in their order without gaps."""
        with self._pulse.waiting:
            self._comm.Allgatherv(send, [receive, counts])

    def broadcast_bytes(self, buffer: NDArray[np.uint8], root: int) -> None:
        """Collective over the group.  Fill `buffer` (same length everywhere) with that of member `root`."""
        with self._pulse.waiting:
            self._comm.Bcast(buffer, root=root)

    def all_gather_counts(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Collective over the group.  counts int64 [k] -> int64 [size, k]."""
        everyone = np.empty((self.size, len(counts)), np.int64)
        with self._pulse.waiting:
            self._comm.Allgather(counts, everyone)
        return everyone
