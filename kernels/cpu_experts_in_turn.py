"""Routed experts whose weights come one after another, from memory that the next ones will soon lie in.

The resident experts run as one kernel over all weights at once; here only one expert's are ever there.  So the tokens
are sorted by expert first, then each expert multiplies its own and gives its weights back, and at the end every token's
parts are summed in float32, ascending expert order, by the kernel that the resident experts use.  Each product is that
of the resident form, chosen by the same rule, so the numbers are the same to the last bit: an expert alone is a layer
of one expert whose weight is one, and the part it leaves is what the sum would have begun with.  Only plain rows are
multiplied here, because their product goes by the busiest expert of the layer.

Every expert is taken and given back in every call, whether or not a token wants it: what feeds it relies on the order.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from bgmpi.errors import InternalError
from bgmpi.kernels import cpu_expert_kernels
from bgmpi.kernels.backend import Experts, ExpertSource
from bgmpi.kernels.cpu_layers import ALONE, FEW_TOKENS, KIND, CpuExperts, Pairs, silu_mul
from bgmpi.kernels.team import Team


class CpuExpertsInTurn:
    """The gated experts of this rank, their weights taken from `source` one by one."""

    def __init__(
        self, team: Team, prepare: Callable[[list[torch.Tensor], list[torch.Tensor]], Experts], source: ExpertSource,
        count: int,
    ) -> None:
        """prepare: what makes experts of weights that stay (see Backend.experts)."""
        self._team, self._prepare, self._source, self._count = team, prepare, source, count

    def __call__(self, x: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Run each token through its local experts and sum in float32, ascending expert order.

        x [T, D], expert int32 [T, A] (local number, -1 = not here), weight float32 [T, A] -> [T, D] in x's dtype.
        """
        if x.shape[0] == 0 or self._count == 0:
            for e in range(self._count):
                self._source.take(e)
                self._source.give(e)
            return torch.zeros_like(x)
        if expert.dtype != torch.int32 or weight.dtype != torch.float32:
            raise InternalError(
                f"experts: expert is {expert.dtype}, weight {weight.dtype}; expected torch.int32, torch.float32"
            )
        expert, weight, x = expert.contiguous(), weight.contiguous(), x.contiguous()
        pairs = Pairs(self._team, expert, self._count)
        parts = self._parts(x, pairs)
        rows_at = np.zeros(self._count, np.int64)
        for e, part in parts.items():
            rows_at[e] = part.data_ptr()
        kept = next(iter(parts.values()), x).dtype
        result = torch.empty_like(x)
        tokens, active = expert.shape
        run = self._team.run if x.numel() > ALONE else self._team.run_alone
        run(cpu_expert_kernels.combine, expert.data_ptr(), weight.data_ptr(), pairs.first, pairs.place, pairs.column,
            rows_at.ctypes.data, KIND[kept], kept.itemsize, result.data_ptr(), tokens, active, x.shape[1],
            KIND[x.dtype], x.element_size())
        return result

    def _parts(self, x: torch.Tensor, pairs: Pairs) -> dict[int, torch.Tensor]:
        """Return each busy expert's rows [pairs of it, D], in the dtype in which the resident experts keep them."""
        rows = x.index_select(0, torch.from_numpy(pairs.tokens))
        parts = {}
        for e in range(self._count):
            gate_up, down = self._source.take(e)
            begin, end = pairs.bounds[e], pairs.bounds[e + 1]
            if end > begin:
                parts[e] = self._part(rows[begin:end], gate_up, down, pairs.most)
            self._source.give(e)
        return parts

    def _part(self, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, most: int) -> torch.Tensor:
        """Run rows x [n, D] through one expert; most: rows of the busiest expert of this call."""
        if x.dtype != gate_up.dtype:
            raise InternalError(f"experts: x is {x.dtype}, the weights are {gate_up.dtype}; they must be equal")
        alone = self._prepare([gate_up], [down])
        if not (isinstance(alone, CpuExperts) and alone.by_most):
            return alone(x, torch.zeros(len(x), 1, dtype=torch.int32), torch.ones(len(x), 1))
        if most > FEW_TOKENS:
            return functional.linear(silu_mul(self._team, functional.linear(x, gate_up)), down)
        return self._few(x, gate_up.contiguous(), down.contiguous())

    def _few(self, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        """Run few rows as dot products; the result is float32."""
        tokens, width = x.shape
        inner, kind, size = down.shape[1], KIND[x.dtype], x.element_size()
        wide = x.float()
        hidden, y = torch.empty(tokens, inner), torch.empty(tokens, width)
        # One expert, busy, with all pairs: pair i is token i.
        book: NDArray[np.int64] = np.array([0, tokens, 1, 0, *range(tokens)])
        first, busy, token = (book.ctypes.data + 8 * place for place in (0, 2, 4))
        weights: NDArray[np.int64] = np.array([gate_up.data_ptr(), down.data_ptr()])
        self._team.run(cpu_expert_kernels.experts_up, wide.data_ptr(), 4 * width, first, busy, token,
                       weights.ctypes.data, width, inner, kind, size, hidden.data_ptr(), tokens, 0, 4, 4)
        self._team.run(cpu_expert_kernels.experts_down, hidden.data_ptr(), first, busy, weights.ctypes.data + 8, inner,
                       width, kind, size, y.data_ptr(), tokens, 4, 0, 4)
        return y
