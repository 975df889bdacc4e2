"""bfloat16 experts on a machine that adds pairs of products: plain rows, turned into panels while they are used."""

from __future__ import annotations

import torch
from numpy.typing import NDArray
import numpy as np

from bgmpi.kernels import cpu_panel_kernels as kernels
from bgmpi.kernels.cpu_layers import CpuExperts, Pairs


class PanelExperts(CpuExperts):
    """The gated experts of this rank, as plain rows of an even width."""

    packs = False

    def _parts(
        self, x: torch.Tensor, pairs: Pairs, rows_at: NDArray[np.int64]
    ) -> tuple[list[torch.Tensor], torch.dtype]:
        """Run every pair through its expert, in two passes over the weights."""
        width, inner = x.shape[1], self._inner
        hidden, y = x.new_empty(pairs.counted, inner), x.new_empty(pairs.counted, width)
        gate_up, down = self._addresses
        self._team.run(kernels.experts_up, x.data_ptr(), 2 * width, pairs.first, pairs.busy, pairs.token,
                       gate_up.ctypes.data, width, inner, hidden.data_ptr(), pairs.counted)
        self._team.run(kernels.experts_down, hidden.data_ptr(), pairs.first, pairs.busy, down.ctypes.data, inner, width,
                       y.data_ptr())
        rows_at[:] = pairs.bounds[:-1]
        rows_at *= 2 * width
        rows_at += y.data_ptr()
        return [y], x.dtype
