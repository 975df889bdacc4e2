"""bfloat16 linear layers and experts on a machine that adds pairs of products: weights laid in panels once.

The panels are the only copy kept.  A row's numbers depend on that row alone, whoever shares the call, so all of this
serves with and without `--deterministic`, and some rows of a weight are a view of its panels.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from bgmpi.errors import InternalError
from bgmpi.kernels import cpu_panel_kernels as kernels
from bgmpi.kernels.cpu_layers import CpuExperts, Pairs, check_rows, last_contiguous
from bgmpi.kernels.emit import LANES
from bgmpi.kernels.panel_code import PAIR_BYTES, PANEL_ROWS
from bgmpi.kernels.team import Team
from bgmpi.kernels.vector_code import compiled_for_pairs


def can_turn(weight: torch.Tensor) -> bool:
    """Say whether this machine multiplies weight [N, K] by panels, and N is worth one."""
    return (
        compiled_for_pairs() and weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0 and len(weight) >= LANES
    )


def turned(team: Team, weight: torch.Tensor, parts: int = 1) -> torch.Tensor:
    """Lay weight bfloat16 [N, K], K even, in panels, uint8; each of `parts` equal parts of its rows begins one."""
    rows, width = weight.shape[0] // parts, weight.shape[1]
    size = -(-rows // PANEL_ROWS) * -(-width // (2 * LANES)) * LANES * PAIR_BYTES
    panels, weight = torch.empty(parts * size, dtype=torch.uint8), weight.contiguous()
    if panels.data_ptr() % 64:
        raise InternalError(f"panels begin at address {panels.data_ptr()}; a multiple of 64 was expected of torch")
    for part in range(parts):
        team.run(kernels.turn, weight[part * rows :].data_ptr(), rows, width, panels.data_ptr() + part * size)
    return panels


class PanelLinear:
    """A weight in panels, or some of its rows."""

    def __init__(
        self, team: Team, panels: torch.Tensor, span: tuple[int, int], width: int, bias: torch.Tensor | None
    ) -> None:
        """Take rows [start, stop) = span of a weight [N, width] in panels, and their bias [stop - start]."""
        self._team, self._panels, self._span, self._width = team, panels, span, width
        self._bias = None if bias is None else bias.contiguous()
        self._address = panels.data_ptr(), 0 if self._bias is None else self._bias.data_ptr()

    @classmethod
    def of(cls, team: Team, weight: torch.Tensor, bias: torch.Tensor | None) -> PanelLinear:
        """Lay weight [N, K] in panels."""
        return cls(team, turned(team, weight), (0, weight.shape[0]), weight.shape[1], bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] -> x @ weight.T + bias, [T, N], in x's dtype."""
        start, stop = self._span
        if x.dtype != torch.bfloat16 or x.shape[1] != self._width:
            raise InternalError(
                f"linear: x is {x.dtype} [{x.shape[0]}, {x.shape[1]}], the weight is torch.bfloat16 "
                f"[{stop - start}, {self._width}]; dtype and width must be equal"
            )
        result = x.new_empty(x.shape[0], stop - start)
        if result.numel():
            x = last_contiguous(x)
            self._team.run(
                kernels.linear, x.data_ptr(), 2 * x.stride(0), *self._address, result.data_ptr(), x.shape[0],
                self._width, start, stop,
            )
        return result

    def rows(self, start: int, stop: int) -> PanelLinear:
        """Return the weight's output rows [start, stop), a view."""
        low, high = self._span
        check_rows(start, stop, high - low)
        bias = None if self._bias is None else self._bias[start:stop]
        return PanelLinear(self._team, self._panels, (low + start, low + stop), self._width, bias)


class PanelExperts(CpuExperts):
    """The gated experts of this rank, in panels."""

    packs = False

    def __init__(self, team: Team, gate_up: list[torch.Tensor], down: list[torch.Tensor]) -> None:
        super().__init__(team, gate_up, down)
        self._gate_up = [turned(team, weight, parts=2) for weight in gate_up]
        self._down = [turned(team, weight) for weight in down]
        self._addresses = [
            np.array([panels.data_ptr() for panels in weights], np.int64) for weights in (self._gate_up, self._down)
        ]

    def _parts(
        self, x: torch.Tensor, pairs: Pairs, rows_at: NDArray[np.int64]
    ) -> tuple[list[torch.Tensor], torch.dtype]:
        width, inner = x.shape[1], self._inner
        hidden, y = x.new_empty(pairs.counted, inner), x.new_empty(pairs.counted, width)
        gate_up, down = self._addresses
        self._team.run(kernels.experts_up, x.data_ptr(), 2 * width, pairs.first, pairs.busy, pairs.token,
                       gate_up.ctypes.data, width, inner, hidden.data_ptr())
        self._team.run(kernels.experts_down, hidden.data_ptr(), pairs.first, pairs.busy, down.ctypes.data, inner, width,
                       y.data_ptr())
        rows_at[:] = pairs.bounds[:-1]
        rows_at *= 2 * width
        rows_at += y.data_ptr()
        return [y], x.dtype
