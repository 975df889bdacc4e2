"""The CPU behind the seam: matrix tiles or oneDNN for products, compiled kernels for what torch has no word for.

One object a rank.  It settles the process's threads and owns nothing else: weights live in the prepared objects it
hands out, pages and hidden rows belong to the caller.  Copies complete at once, so every receipt is already done.
It refuses to know sequences, rounds and files; a micro-batch is offsets and page numbers.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from bgmpi.errors import InternalError, UsageError
from bgmpi.kernels import (
    cpu_attention,
    cpu_exchange,
    cpu_group,
    cpu_layers,
    cpu_page_kernels,
    cpu_pair_exchange,
    cpu_row_kernels,
)
from bgmpi.kernels.backend import (
    AttentionPlan,
    Collective,
    Exchanged,
    Experts,
    ExpertSource,
    Group,
    HeadLinear,
    Linear,
)
from bgmpi.kernels.cpu_attention import CpuPlan
from bgmpi.kernels.cpu_exchange import CpuExchanged
from bgmpi.kernels.cpu_experts_in_turn import CpuExpertsInTurn
from bgmpi.kernels.cpu_layers import ALONE, KIND
from bgmpi.kernels.cpu_pair_exchange import PairExchanged
from bgmpi.kernels.cpu_panels import PanelExperts, PanelLinear, can_turn
from bgmpi.kernels.cpu_steady import SteadyExperts, SteadyHeads, SteadyLinear
from bgmpi.kernels.cpu_tiles import TileExperts, TileLinear, Tiles, ask_for_tiles
from bgmpi.kernels.team import Team, bits


class Done:
    """The receipt of a copy that completed at once."""

    def done(self) -> bool:
        """Say whether the copy has ended.  Local, never blocks."""
        return True

    def wait(self) -> None:
        """Return once the copy has ended.  Local."""


def own_plan(plan: AttentionPlan) -> CpuPlan:
    """Return the plan as one of this device's own, which only `plan_attention` makes."""
    if not isinstance(plan, CpuPlan):
        raise InternalError(f"a plan of kind {type(plan).__name__} came to the CPU; make it with its plan_attention")
    return plan


class CpuBackend:
    """The CPU device of one rank."""

    name = "cpu"

    def __init__(
        self, collective: Collective | None, threads: int, tiles: bool | None = None, deterministic: bool = False,
        panels: bool = True,
    ) -> None:
        """Settle the threads.  tiles: whether bfloat16 weights go through matrix tiles; None: where the machine can.
        deterministic: no product or sum of a library whose order depends on the batch (tiles and panels keep theirs).
        panels: whether bfloat16 weights lie in panels where the machine multiplies them and has no tiles."""
        self.device, self.deterministic = torch.device("cpu"), deterministic
        self.threads = threads
        self._collective = collective if collective is not None and collective.size > 1 else None
        torch.set_num_threads(threads)
        self._team = Team(threads)
        may = tiles is not False and ask_for_tiles()
        if tiles and not may:
            raise UsageError("tiles=True: this machine, or the kernel of its system, has no bfloat16 matrix tiles")
        self._tiles = Tiles(self._team) if may else None
        self._panels = panels

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised device memory."""
        return torch.empty(shape, dtype=dtype)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Done:
        """Copy `source` into `target` (same shape and dtype); complete on return."""
        if target.shape != source.shape or target.dtype != source.dtype:
            raise InternalError(
                f"copy: target is {target.dtype} {tuple(target.shape)}, source is {source.dtype} "
                f"{tuple(source.shape)}; both must be the same"
            )
        target.copy_(source)
        return Done()

    def copy_pages(
        self, target: torch.Tensor, target_pages: NDArray[np.int64], source: torch.Tensor,
        source_pages: NDArray[np.int64],
    ) -> Done:  # fmt: skip
        """Copy pages between two tiers on all threads (see Backend.copy_pages); complete on return."""
        cpu_page_kernels.run_copy(self._team, target, target_pages, source, source_pages)
        return Done()

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, steady: bool = False) -> Linear:
        """Prepare weight [N, K] and bias [N] (see Backend.linear); rows stay where they are, but bfloat16 without tiles
        is re-laid."""
        if self._tiles is not None and weight.dtype == torch.bfloat16:
            return TileLinear(self._tiles, weight, bias)
        if self._panels and can_turn(weight):
            return PanelLinear.of(self._team, weight, bias)
        if self.deterministic or steady:
            return SteadyLinear(self._team, weight, bias)
        if cpu_layers.can_pack(weight.dtype):
            return cpu_layers.PackedLinear(weight, bias)
        return cpu_layers.PlainLinear(self._team, weight, bias)

    def head_linear(self, weight: torch.Tensor) -> HeadLinear:
        """Prepare weight [H, N, K], of which head h has its own."""
        return SteadyHeads(self._team, weight) if self.deterministic else cpu_layers.PlainHeads(weight)

    def experts(self, gate_up: list[torch.Tensor], down: list[torch.Tensor]) -> Experts:
        """Prepare E experts: gate_up [2 * I, D] each (gate rows first), down [D, I] each; activation SiLU."""
        if self._tiles is not None and gate_up and gate_up[0].dtype == torch.bfloat16:
            return TileExperts(self._tiles, gate_up, down)
        if self._panels and gate_up and can_turn(gate_up[0]) and can_turn(down[0]):
            return PanelExperts(self._team, gate_up, down)
        return (SteadyExperts if self.deterministic else cpu_layers.CpuExperts)(self._team, gate_up, down)

    def experts_in_turn(self, source: ExpertSource, count: int) -> Experts:
        """Prepare `count` experts whose weights come one after another (see Backend.experts_in_turn)."""
        return CpuExpertsInTurn(self._team, self.experts, source, count)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [..., D] -> normalised in float32, scaled, in x's dtype."""
        x = x.contiguous()
        result = torch.empty_like(x)
        width, numbers = x.shape[-1], x.numel()
        run = self._team.run if numbers > ALONE else self._team.run_alone
        run(cpu_row_kernels.rms_norm, x.data_ptr(), weight.data_ptr(), result.data_ptr(), numbers // width, width,
            KIND[x.dtype], x.element_size(), bits(eps), KIND[weight.dtype])
        return result

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [T, 2 * I] -> silu(gate) * up, [T, I]."""
        return cpu_layers.silu_mul(self._team, gate_up)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate x [T, heads, W] in place in its first 2 * r columns and return it; cos, sin float32 [T, r]."""
        if x.stride(2) != 1:
            raise InternalError(f"rotate: x {tuple(x.shape)} has strides {x.stride()}; its last must be 1")
        cos, sin, size = cos.contiguous(), sin.contiguous(), x.element_size()
        run = self._team.run if x.numel() > ALONE else self._team.run_alone
        run(cpu_row_kernels.rotate, x.data_ptr(), x.stride(0) * size, x.stride(1) * size, cos.data_ptr(),
            sin.data_ptr(), x.shape[0], x.shape[1], cos.shape[1], KIND[x.dtype])
        return x

    def plan_attention(
        self, first: NDArray[np.int32], kv_before: NDArray[np.int32], pages: NDArray[np.int32], page_tokens: int
    ) -> CpuPlan:
        """Prepare a micro-batch (see Backend.plan_attention)."""
        few_new = int(first[-1]) if self.deterministic else cpu_attention.FEW_NEW
        return CpuPlan(first, kv_before, pages, page_tokens, few_new, share=not self.deterministic)

    def append(self, key: torch.Tensor, value: torch.Tensor, layer_pages: torch.Tensor, plan: AttentionPlan) -> None:
        """Write key, value [T, G, W] of the new tokens into their places."""
        plan = own_plan(plan)
        cpu_attention.append_rows(self._team, key, layer_pages[:, 0], plan)
        cpu_attention.append_rows(self._team, value, layer_pages[:, 1], plan)

    def append_latent(self, latent: torch.Tensor, layer_pages: torch.Tensor, plan: AttentionPlan) -> None:
        """Write latent [T, L] of the new tokens into their places."""
        cpu_attention.append_rows(self._team, latent[:, None], layer_pages[:, None], own_plan(plan))

    def attend(
        self, query: torch.Tensor, layer_pages: torch.Tensor, plan: AttentionPlan, scale: float, window: int
    ) -> torch.Tensor:
        """Causal attention of query [T, H, W] over each sequence's pages -> [T, H, W]."""
        plan = own_plan(plan)
        tokens, heads, width = query.shape
        if query.stride(2) != 1 or query.stride(1) != width:
            query = query.contiguous()
        result = torch.empty(tokens, heads, width, dtype=query.dtype)
        places = cpu_attention.grouped_places(layer_pages, heads)
        cpu_attention.attend_rows(self._team, query, layer_pages, plan, places, scale, window, result)
        return result

    def attend_latent(
        self, query: torch.Tensor, layer_pages: torch.Tensor, plan: AttentionPlan, scale: float, value_width: int
    ) -> torch.Tensor:
        """Causal attention of query [T, H, L] over latent pages -> [T, H, value_width]."""
        plan = own_plan(plan)
        tokens, heads, width = query.shape
        if query.stride(2) != 1 or query.stride(1) != width:
            query = query.contiguous()
        result = torch.empty(tokens, heads, value_width, dtype=query.dtype)
        places = cpu_attention.latent_places(layer_pages, heads, value_width)
        cpu_attention.attend_rows(self._team, query, layer_pages, plan, places, scale, 0, result)
        return result

    def exchange(
        self, x: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor, owner: torch.Tensor, local: torch.Tensor
    ) -> CpuExchanged | PairExchanged:
        """Collective over the expert ranks, also with T = 0 (see Backend.exchange)."""
        if self._collective is None:
            return cpu_exchange.stay(x, expert, weight, local)
        send = cpu_pair_exchange.send if self.deterministic else cpu_exchange.send
        return send(self._team, self._collective, x, expert, weight, owner, local)

    def give_back(self, exchanged: Exchanged, y: torch.Tensor) -> torch.Tensor:
        """Collective over the expert ranks.  Send y [N, D] back -> [T, D] (see Backend.give_back)."""
        if self._collective is None:
            return y
        if isinstance(exchanged, PairExchanged):
            return cpu_pair_exchange.send_back(self._team, self._collective, exchanged, y)
        assert isinstance(exchanged, CpuExchanged), "give_back takes what exchange of the same backend returned"
        return cpu_exchange.send_back(self._team, self._collective, exchanged, y)

    def gather_columns(self, part: torch.Tensor, group: Group, widths: tuple[int, ...]) -> torch.Tensor:
        """Collective over the group, but for T = 0.  part [T, n] -> [T, sum of widths] on every member."""
        return cpu_group.gather_columns(part, group, widths)

    def spread(self, rows: torch.Tensor, group: Group, root: int) -> None:
        """Collective over the group, unless empty.  Overwrite contiguous rows with those of member `root`."""
        cpu_group.spread(rows, group, root)
