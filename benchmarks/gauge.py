"""Looks at the machine's two ceilings again and again while a job runs, because on a shared machine they move.

On a virtual machine the same product was seen to run at 400 and at 1,900 GFLOP/s within seconds, with nothing else
running in it.  A ceiling measured before or after a minute of work then says little about that minute.  So the job is
paused between two steps every half second for a product of side 2048 and for reading a piece of memory that no cache
holds; the pauses are counted and left out of the job's time.  A step is compared with what was measured just before
and just after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from machine import SIDE, best_seconds
from numpy.typing import NDArray
from watch import replaced

from bgmpi.sequence_manager import SequenceManager

_PIECE = 1 << 28
_PIECES = 4


class Gauge:
    """Ceilings over time.  paused: seconds spent in looking."""

    def __init__(self, every: float = 0.5) -> None:
        x, weight = torch.randn(SIDE, SIDE).bfloat16(), torch.randn(SIDE, SIDE).bfloat16()
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, SIDE)
        self._multiply = lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
        self._memory = torch.ones(_PIECES, _PIECE // 4)
        self._vector = torch.ones(4096)
        self._every = every
        self._next_piece = 0
        self._last = 0.0
        self._looks: list[tuple[float, float]] = []
        self._look_of_step: list[int] = []
        #: seconds spent in looking before each step began, all together
        self.seconds_before_step: list[float] = []
        self.paused = 0.0

    def before_step(self) -> None:
        """Look if it is time, and remember which look came before the step."""
        if time.perf_counter() - self._last >= self._every:
            self.look()
        self._look_of_step.append(len(self._looks) - 1)
        self.seconds_before_step.append(self.paused)

    def look(self) -> None:
        """Measure both ceilings once."""
        begun = time.perf_counter()
        peak = 2 * SIDE**3 / best_seconds(self._multiply, 2)
        piece = self._memory[self._next_piece % _PIECES]
        self._next_piece += 1
        other = self._memory[self._next_piece % _PIECES].view(-1, 4096)
        reading = time.perf_counter()
        piece.sum()
        between = time.perf_counter()
        torch.mv(other, self._vector)
        self._last = time.perf_counter()
        # The better of both ways of reading, as machine.read_bandwidth takes it: a low ceiling flatters.
        self._looks.append((peak, _PIECE / min(between - reading, self._last - between)))
        self.paused += self._last - begun

    def ceilings(self) -> NDArray[np.float64]:
        """Return FLOP/s and bytes/s of every step, float64 [steps, 2]: the mean of the looks before and after it."""
        looks = np.array(self._looks)
        before = np.array(self._look_of_step)
        after = np.minimum(before + 1, len(looks) - 1)
        mean: NDArray[np.float64] = (looks[before] + looks[after]) / 2
        return mean


@contextmanager
def gauged() -> Iterator[Gauge]:
    """Look at the ceilings between the steps of the job that runs inside the block."""
    gauge = Gauge()

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        def plan(manager: SequenceManager) -> Any:
            found = call(manager)
            if found is not None:
                gauge.before_step()
            return found

        return plan

    with replaced(SequenceManager, "plan", wrap):
        yield gauge
    gauge.look()
