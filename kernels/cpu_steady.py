"""Linear layers and experts whose answer for a row depends on that row alone (`--deterministic`).

A library picks its blocking, and with it the order of a row's sums, by how many rows it is given.  Here every product
is the dot kernels', whose order the width alone decides, whether one token comes or thousands; bfloat16 goes through
the machine's pair product where there is one (and most of it there not through this file but through `cpu_panels`).
Parts of experts are rounded to the model's dtype before they are summed, because that is what travels between ranks.

Rejected: padding calls of the library to one fixed number of rows.  Nothing promises that a row's place in the padded
call does not matter, and one token would cost as much as a whole tile of them.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from bgmpi.errors import InternalError
from bgmpi.kernels import cpu_dot_kernels
from bgmpi.kernels.cpu_layers import KIND, CpuExperts, Pairs, check_rows
from bgmpi.kernels.team import Team
from bgmpi.kernels.vector_code import compiled_for_pairs


def token_form(dtype: torch.dtype) -> torch.dtype:
    """Return in which form tokens of a model in `dtype` meet its weights: float32, or bfloat16 for the pair product."""
    return torch.bfloat16 if dtype == torch.bfloat16 and compiled_for_pairs() else torch.float32


def multiply(team: Team, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, H, K], weight [H, N, K] contiguous, bias [N] -> [T, H, N] in x's dtype, each row of x by itself."""
    (tokens, heads, width), rows, dtype = x.shape, weight.shape[1], weight.dtype
    if x.dtype != dtype or (heads, width) != (weight.shape[0], weight.shape[2]):
        raise InternalError(
            f"linear: x is {x.dtype} {tuple(x.shape)}, the weight is {dtype} {tuple(weight.shape)}; dtype, heads and "
            "width must be equal"
        )
    result = torch.empty(tokens, heads, rows, dtype=dtype)
    if not result.numel():
        return result
    form = token_form(dtype)
    x = x.to(form)
    if x.stride(2) != 1:
        x = x.contiguous()
    size = form.itemsize
    team.run(
        cpu_dot_kernels.linear, x.data_ptr(), x.stride(0) * size, x.stride(1) * size, weight.data_ptr(),
        0 if bias is None else bias.data_ptr(), result.data_ptr(), tokens, heads, width, rows, KIND[dtype],
        dtype.itemsize, size,
    )
    return result


class SteadyLinear:
    """A weight as rows."""

    def __init__(self, team: Team, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Take weight [N, K] and bias [N]."""
        self._team, self._rows = team, weight.shape[0]
        self._weight = weight.contiguous()
        self._bias = None if bias is None else bias.contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] -> x @ weight.T + bias, [T, N], in x's dtype."""
        return multiply(self._team, x[:, None], self._weight[None], self._bias)[:, 0]

    def rows(self, start: int, stop: int) -> SteadyLinear:
        """Return the weight's output rows [start, stop), a view."""
        check_rows(start, stop, self._rows)
        bias = None if self._bias is None else self._bias[start:stop]
        return SteadyLinear(self._team, self._weight[start:stop], bias)


class SteadyHeads:
    """One weight a head."""

    def __init__(self, team: Team, weight: torch.Tensor) -> None:
        """Take weight [H, N, K]."""
        self._team, self._weight = team, weight.contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H, K] -> [T, H, N], in x's dtype."""
        return multiply(self._team, x, self._weight, None)

    def heads(self, start: int, stop: int) -> SteadyHeads:
        """Return the weights of heads [start, stop), a view."""
        return SteadyHeads(self._team, self._weight[start:stop])


class SteadyExperts(CpuExperts):
    """The gated experts of this rank, as plain rows."""

    packs = False

    def _parts(
        self, x: torch.Tensor, pairs: Pairs, rows_at: NDArray[np.int64]
    ) -> tuple[list[torch.Tensor], torch.dtype]:
        return [self._dots(x.to(token_form(x.dtype)), pairs, rows_at, x.dtype)], x.dtype
