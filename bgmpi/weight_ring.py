"""Weights that do not fit pass through a ring of memory, read ahead of their use, each once a sweep.

The plan names the units that stream and a sweep uses them in that order, again and again; so the ring always holds the
next few, and giving one back starts the reading of as many as now fit.  Reading happens on threads of its own, past the
page cache where that is possible (`io/layer_files.py`), and overlaps with whatever the rank computes.

The ledger, the order and the requests belong to the rank's own thread: a reading thread gets a place and a unit and
knows nothing else, so there is nothing to lock.  What fails in it, a cut file or a NaN, is raised by `take` of the unit
that it concerns.  The first sweep looks at every number, as loading does; later ones trust the file.

Refuses to know layers and tokens.  A unit may be given back only when nothing reads its weights any more.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from bgmpi.architecture import Architecture
from bgmpi.errors import InternalError
from bgmpi.io.layer_files import LayerFiles, aligned_buffer
from bgmpi.weight_plan import ByteRing, Unit, WeightPlan

_LOG = logging.getLogger("bgmpi.weights")
#: Two, so that the disk has its next request while a thread finishes with the one before.
_READERS = 2

UnitWeights = Mapping[tuple[str, ...], torch.Tensor]


class WeightRing:
    """The streamed weights of one rank.  Use it in a `with` block, from one thread."""

    def __init__(
        self, arch: Architecture, plan: WeightPlan, files: LayerFiles, *, allow_nonfinite: bool = False
    ) -> None:
        """Begin to read at once.  plan: what streams, at least one unit; files: read as the model's dtype."""
        self._arch, self._files, self._order = arch, files, plan.streamed
        self._streamed = frozenset(plan.streamed)
        self._allow_nonfinite = allow_nonfinite
        self._buffer = aligned_buffer(plan.ring_bytes)
        self._ledger = ByteRing(plan.ring_bytes)
        self._rooms = {unit: [files.room(unit.names(arch, group)) for group in unit.groups] for unit in self._order}
        self._ahead: deque[tuple[Unit, Future[UnitWeights]]] = deque()
        self._taken: deque[Unit] = deque()
        self._asked = 0
        self._given = 0
        self._readers = ThreadPoolExecutor(_READERS, "bgmpi-weights", initializer=_alone)
        self._read_on()

    def streams(self, unit: Unit) -> bool:
        """Say whether a unit passes through the ring.  Local."""
        return unit in self._streamed

    def take(self, unit: Unit) -> UnitWeights:
        """Wait for a unit and return its matrices by group; they are there until `give`.  Local.

        Units that the sweep has before it are passed over: a rank without tokens need not ask for them.  Raises what
        reading raised: InputError for files that are cut or hold NaN or Inf.
        """
        if unit not in self._streamed:
            raise InternalError(f"the weight ring was asked for {unit}, which stays in memory or is another rank's")
        while self._ahead and self._ahead[0][0] != unit:
            self._pass_over()
        if not self._ahead:
            raise InternalError(f"the weight ring was asked for {unit} while {list(self._taken)} fill it")
        weights = self._ahead[0][1].result()
        self._ahead.popleft()
        self._taken.append(unit)
        return weights

    def give(self, unit: Unit) -> None:
        """Give back the unit that was taken first; its place is read over at once.  Local."""
        if not self._taken or self._taken[0] != unit:
            raise InternalError(f"the weight ring got {unit} back, not the oldest of {list(self._taken)}")
        self._taken.popleft()
        self._ledger.free()
        self._given += 1
        if self._given == len(self._order):
            self._log_rate()
        self._read_on()

    def close(self) -> None:
        """End the reading; returns when the last request has ended.  Local, may be called twice."""
        self._readers.shutdown(wait=True, cancel_futures=True)
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- inside ---------------------------------------------------------------------------------------------------

    def _pass_over(self) -> None:
        """Drop the next unit; it was read in vain."""
        unit, reading = self._ahead[0]
        if self._taken:
            raise InternalError(f"the weight ring cannot pass over {unit} while {list(self._taken)} are taken")
        reading.result()
        self._ahead.popleft()
        self._taken.append(unit)
        self.give(unit)

    def _read_on(self) -> None:
        """Begin to read as many further units as fit."""
        while len(self._ahead) + len(self._taken) < len(self._order):
            unit = self._order[self._asked % len(self._order)]
            rooms = self._rooms[unit]
            begin = self._ledger.allocate(sum(rooms))
            if begin is None:
                return
            look = not self._allow_nonfinite and self._asked < len(self._order)
            place = self._buffer[begin : begin + sum(rooms)]
            self._ahead.append((unit, self._readers.submit(self._read, unit, place, look)))
            self._asked += 1

    def _read(self, unit: Unit, place: NDArray[np.uint8], look: bool) -> UnitWeights:
        """Read one unit.  Runs on a reading thread."""
        found, begin = {}, 0
        for group, room in zip(unit.groups, self._rooms[unit], strict=True):
            names = unit.names(self._arch, group)
            found[group] = self._files.read(names, place[begin : begin + room], allow_nonfinite=not look)
            begin += room
        return found

    def _log_rate(self) -> None:
        """Tell once, after the first sweep, what reading gave."""
        files = self._files
        way = "past the page cache" if files.direct else "by mapping the files"
        _LOG.info(
            "weights: %.2f GB pass through a ring of %.0f MB in every sweep, read %s at %.2f GB/s",
            files.bytes_read / 1e9, self._ledger.size / 1e6, way, files.bytes_read / 1e9 / max(files.seconds, 1e-9),
        )


def _alone() -> None:
    """Keep torch on this reading thread to one thread; the count is each thread's own, the rank's keeps its own."""
    torch.set_num_threads(1)
