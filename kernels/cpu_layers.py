"""Linear layers and experts of every number but bfloat16, and of that on a CPU without matrix tiles and pair product
(`cpu_tiles`, `cpu_panels` do the rest): which weights are kept in which form, and which product runs when.

bfloat16 weights are re-laid once by oneDNN (the only copy kept).  Other numbers keep their plain rows, which the small
kernel reads faster than oneDNN reads its own form up to `FEW_TOKENS`, and torch multiplies at the peak beyond.  A
machine on which oneDNN has no bfloat16 uses the plain form too.  Rejected: both forms of every weight, twice the memory
for no measured gain.

Experts: pairs (token, expert) sorted by expert, each expert's weights read once, the weighted sum of a token in float32
and ascending expert order whatever path computed the parts.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from bgmpi.errors import InternalError
from bgmpi.kernels import cpu_dot_kernels, cpu_expert_kernels, cpu_row_kernels
from bgmpi.kernels.team import Team

KIND = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
#: Up to so many tokens the small kernel is as fast as the large product (measured, float32; docs in benchmarks).
FEW_TOKENS = 32
#: Work below so many numbers is not worth waking the other threads.
ALONE = 16384


def can_pack(dtype: torch.dtype) -> bool:
    """Say whether this machine's oneDNN multiplies this dtype from packed weights."""
    return dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Re-lay weight [N, K] for oneDNN."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 64)
    return packed


def last_contiguous(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a copy whose rows are contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def check_rows(start: int, stop: int, rows: int) -> None:
    """Raise InternalError unless [start, stop) are some of the rows, or none."""
    if not 0 <= start <= stop <= rows:
        raise InternalError(f"rows: asked for [{start}, {stop}) of a weight with {rows} rows; they must lie within it")


class PackedLinear:
    """A bfloat16 weight in oneDNN's form, or some of its rows."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, whole: PackedLinear | None = None, first: int = 0
    ) -> None:
        """Take weight [N, K] and bias [N].  whole: the weight of which these are the rows from `first` on."""
        self._rows, self._whole, self._first = weight.shape[0], whole, first
        self._weight = pack(weight) if self._rows else weight
        self._bias = bias
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] -> x @ weight.T + bias, [T, N], in x's dtype."""
        if x.shape[0] == 0 or self._rows == 0:
            return x.new_empty(x.shape[0], self._rows)
        if self._whole is not None and x.shape[0] > FEW_TOKENS:
            return self._whole(x)[:, self._first : self._first + self._rows].contiguous()
        result: torch.Tensor = self._multiply(x, self._weight, self._bias, "none", [], "")
        return result

    def rows(self, start: int, stop: int) -> PackedLinear:
        """Return the weight's output rows [start, stop), re-laid.

        With many tokens the library's sums depend on how many rows it multiplies, so there the whole is computed.
        """
        check_rows(start, stop, self._rows)
        bias = None if self._bias is None else self._bias[start:stop]
        return PackedLinear(self._weight.to_dense()[start:stop], bias, self, start)


class PlainLinear:
    """A weight as rows, or some of them."""

    def __init__(
        self, team: Team, weight: torch.Tensor, bias: torch.Tensor | None, whole: PlainLinear | None = None,
        first: int = 0,
    ) -> None:
        """Take weight [N, K] and bias [N].  whole: the weight of which these are the rows from `first` on."""
        self._team, self._whole, self._first = team, whole, first
        self._weight = weight.contiguous()
        self._bias = None if bias is None else bias.contiguous()
        self._rows, self._width = weight.shape
        size = weight.element_size()
        self._words = (self._width, self._rows, KIND[weight.dtype], size)
        self._address = self._weight.data_ptr(), 0 if self._bias is None else self._bias.data_ptr()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] -> x @ weight.T + bias, [T, N], in x's dtype."""
        if x.dtype != self._weight.dtype or x.shape[1] != self._width:
            raise InternalError(
                f"linear: x is {x.dtype} [{x.shape[0]}, {x.shape[1]}], the weight is {self._weight.dtype} "
                f"[{self._rows}, {self._width}]; dtype and width must be equal"
            )
        tokens = x.shape[0]
        if tokens > FEW_TOKENS:
            if self._whole is not None:
                return self._whole(x)[:, self._first : self._first + self._rows].contiguous()
            return functional.linear(x, self._weight, self._bias)
        result = torch.empty(tokens, self._rows, dtype=x.dtype)
        if tokens and self._rows:
            wide = last_contiguous(x.float())
            self._team.run(
                cpu_dot_kernels.linear, wide.data_ptr(), wide.stride(0) * 4, 0, *self._address, result.data_ptr(),
                tokens, 1, *self._words, 4,
            )
        return result

    def rows(self, start: int, stop: int) -> PlainLinear:
        """Return the weight's output rows [start, stop), a view.

        With many tokens the library's sums depend on how many rows it multiplies, so there the whole is computed.
        """
        check_rows(start, stop, self._rows)
        bias = None if self._bias is None else self._bias[start:stop]
        return PlainLinear(self._team, self._weight[start:stop], bias, self, start)


class PlainHeads:
    """One weight a head, as torch multiplies it."""

    def __init__(self, weight: torch.Tensor) -> None:
        """Take weight [H, N, K]."""
        self._weight = weight.transpose(1, 2).contiguous()  # [H, K, N]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H, K] -> [T, H, N], in x's dtype."""
        return torch.bmm(x.transpose(0, 1), self._weight).transpose(0, 1)

    def heads(self, start: int, stop: int) -> PlainHeads:
        """Return the weights of heads [start, stop), a view."""
        return PlainHeads(self._weight[start:stop].transpose(1, 2))


def silu_mul(team: Team, gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 * I] -> silu(gate) * up, [T, I]."""
    gate_up = gate_up.contiguous()
    tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
    result = torch.empty(tokens, inner, dtype=gate_up.dtype)
    run = team.run if tokens * inner > ALONE else team.run_alone
    run(cpu_row_kernels.silu_mul, gate_up.data_ptr(), result.data_ptr(), tokens, inner, KIND[gate_up.dtype],
        gate_up.element_size())
    return result


class Pairs:
    """The (token, expert) pairs of one call, sorted by expert; numbers live in one buffer."""

    def __init__(self, team: Team, expert: torch.Tensor, experts: int) -> None:
        tokens, active = expert.shape
        pairs = tokens * active
        self._held = np.empty(2 * (experts + 1) + 3 * pairs, np.int64)
        self.first = self._held.ctypes.data
        self.busy = self.first + 8 * (experts + 1)
        self.token = self.busy + 8 * (experts + 1)
        self.place = self.token + 8 * pairs
        self.column = self.place + 8 * pairs
        team.run_alone(cpu_expert_kernels.sort_pairs, expert.data_ptr(), tokens, active, experts, self.first, self.busy,
                       self.token, self.place, self.column)
        if self._held[experts + 1] < 0:
            raise InternalError(
                f"experts: an expert number is {int(expert.max())}, this rank owns {experts}; numbers must be local"
            )
        bounds = self._held[: experts + 1]
        self.counted = int(bounds[experts])
        self.bounds: list[int] = bounds.tolist()
        begin = experts + 2
        self.active: list[int] = self._held[begin : begin + int(self._held[begin - 1])].tolist()
        self.most = max((self.bounds[e + 1] - self.bounds[e] for e in self.active), default=0)
        self.tokens: NDArray[np.int64] = self._held[2 * (experts + 1) :][: self.counted]


class CpuExperts:
    """The gated experts of this rank."""

    #: Whether bfloat16 weights are re-laid for the library, where the machine can.
    packs = True

    def __init__(self, team: Team, gate_up: list[torch.Tensor], down: list[torch.Tensor]) -> None:
        self._team = team
        self._count = len(gate_up)
        self._packed = self.packs and bool(gate_up) and can_pack(gate_up[0].dtype)
        #: Whether the busiest expert of a call decides which product runs.
        self.by_most = self.packs and not self._packed
        self._multiply = torch.ops.mkldnn._linear_pointwise.default
        prepare = pack if self._packed else torch.Tensor.contiguous
        self._inner = down[0].shape[1] if down else 0
        self._dtype = gate_up[0].dtype if gate_up else torch.float32
        self._gate_up = [prepare(weight) for weight in gate_up]
        self._down = [prepare(weight) for weight in down]
        self._addresses = [
            np.array([] if self._packed else [weight.data_ptr() for weight in weights], np.int64)
            for weights in (self._gate_up, self._down)
        ]

    def __call__(self, x: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Run each token through its local experts and sum in float32, ascending expert order.

        x [T, D], expert int32 [T, A] (local number, -1 = not here), weight float32 [T, A] -> [T, D] in x's dtype.
        """
        if x.shape[0] == 0 or self._count == 0:
            return torch.zeros_like(x)
        if x.dtype != self._dtype or expert.dtype != torch.int32 or weight.dtype != torch.float32:
            raise InternalError(
                f"experts: x is {x.dtype}, expert {expert.dtype}, weight {weight.dtype}; expected {self._dtype}, "
                "torch.int32, torch.float32"
            )
        expert, weight, x = expert.contiguous(), weight.contiguous(), x.contiguous()
        pairs = Pairs(self._team, expert, self._count)
        rows_at = np.zeros(self._count, np.int64)
        kept, dtype = self._parts(x, pairs, rows_at)
        result = torch.empty_like(x)
        tokens, active = expert.shape
        run = self._team.run if x.numel() > ALONE else self._team.run_alone
        run(cpu_expert_kernels.combine, expert.data_ptr(), weight.data_ptr(), pairs.first, pairs.place, pairs.column,
            rows_at.ctypes.data, KIND[dtype], dtype.itemsize, result.data_ptr(), tokens, active, x.shape[1],
            KIND[x.dtype], x.element_size())
        del kept
        return result

    def _parts(
        self, x: torch.Tensor, pairs: Pairs, rows_at: NDArray[np.int64]
    ) -> tuple[list[torch.Tensor], torch.dtype]:
        """Run every pair; note where each expert's rows [pairs of it, D] lie.  -> what holds them, their dtype."""
        if self._packed or pairs.most > FEW_TOKENS:
            return self._large(x, pairs, rows_at), x.dtype
        return [self._dots(x.float(), pairs, rows_at, torch.float32)], torch.float32

    def _large(self, x: torch.Tensor, pairs: Pairs, rows_at: NDArray[np.int64]) -> list[torch.Tensor]:
        """One product per expert and layer."""
        kept = []
        rows = x.index_select(0, torch.from_numpy(pairs.tokens))
        for e in pairs.active:
            mine = rows[pairs.bounds[e] : pairs.bounds[e + 1]]
            y = self._product(silu_mul(self._team, self._product(mine, self._gate_up[e])), self._down[e])
            rows_at[e] = y.data_ptr()
            kept.append(y)
        return kept

    def _product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if not self._packed:
            return functional.linear(x, weight)
        result: torch.Tensor = self._multiply(x, weight, None, "none", [], "")
        return result

    def _dots(self, x: torch.Tensor, pairs: Pairs, rows_at: NDArray[np.int64], kept: torch.dtype) -> torch.Tensor:
        """All experts in two passes over their weights; all threads read all the time.

        x, and what is between the passes, are float32, or bfloat16 for the pair product; the result is `kept`.
        """
        width, inner, size = x.shape[1], self._inner, x.element_size()
        weight = KIND[self._dtype], self._dtype.itemsize
        hidden = torch.empty(pairs.counted, inner, dtype=x.dtype)
        y = torch.empty(pairs.counted, width, dtype=kept)
        gate_up, down = self._addresses
        self._team.run(cpu_expert_kernels.experts_up, x.data_ptr(), size * width, pairs.first, pairs.busy, pairs.token,
                       gate_up.ctypes.data, width, inner, *weight, hidden.data_ptr(), pairs.most, KIND[x.dtype], size,
                       size)
        self._team.run(cpu_expert_kernels.experts_down, hidden.data_ptr(), pairs.first, pairs.busy, down.ctypes.data,
                       inner, width, *weight, y.data_ptr(), pairs.most, size, KIND[kept], kept.itemsize)
        rows_at[:] = pairs.bounds[:-1]
        rows_at *= kept.itemsize * width
        rows_at += y.data_ptr()
        return y
