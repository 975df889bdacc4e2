"""bfloat16 experts on a machine that adds pairs of products: weights laid in panels once, two kernel calls a layer.

The panels are the only copy kept.  A row's numbers depend on that row alone, whoever shares the call, so these experts
serve with and without `--deterministic`.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from bgmpi.errors import InternalError
from bgmpi.kernels import cpu_panel_kernels as kernels
from bgmpi.kernels.cpu_layers import CpuExperts, Pairs
from bgmpi.kernels.team import Team
from bgmpi.kernels.vector_code import compiled_for_pairs


def can_turn(gate_up: list[torch.Tensor], down: list[torch.Tensor]) -> bool:
    """Say whether this machine multiplies these experts' weights by panels: bfloat16, of even widths."""
    weights = [*gate_up[:1], *down[:1]]
    return compiled_for_pairs() and all(one.dtype == torch.bfloat16 and one.shape[1] % 2 == 0 for one in weights)


def turned(team: Team, weight: torch.Tensor, parts: int = 1) -> torch.Tensor:
    """Lay weight bfloat16 [N, K], K even, in panels; each of `parts` equal parts of its rows begins one."""
    rows, width = weight.shape[0] // parts, weight.shape[1]
    size = -(-rows // kernels.PANEL_ROWS) * -(-width // 2 // kernels.LANES) * kernels.LANES * kernels.PAIR_BYTES
    panels, weight = torch.empty(parts * size, dtype=torch.uint8), weight.contiguous()
    if panels.data_ptr() % 64:
        raise InternalError(f"panels begin at address {panels.data_ptr()}; a multiple of 64 was expected of torch")
    for part in range(parts):
        team.run(kernels.turn, weight[part * rows :].data_ptr(), rows, width, panels.data_ptr() + part * size)
    return panels


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
