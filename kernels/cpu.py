"""The CPU behind the seam: torch for large products, compiled kernels for what torch has no word for.

One object a rank.  It settles the process's threads and owns nothing else: weights live in the prepared objects it
hands out, pages and hidden rows belong to the caller.  Copies complete at once, so every receipt is already done.
It refuses to know sequences, rounds and files; a micro-batch is offsets and page numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from bgmpi.kernels import reference
from bgmpi.kernels.backend import Collective, Exchanged, Experts, Linear


class Done:
    """The receipt of a copy that completed at once."""

    def done(self) -> bool:
        """Say whether the copy has ended.  Local, never blocks."""
        return True

    def wait(self) -> None:
        """Return once the copy has ended.  Local."""


class CpuLinear:
    """x [T, K] -> [T, N]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] -> x @ weight.T + bias, [T, N], in x's dtype."""
        return functional.linear(x, self.weight, self.bias)


class CpuExperts:
    """The experts of this rank."""

    def __init__(self, gate_up: list[torch.Tensor], down: list[torch.Tensor]) -> None:
        self.gate_up = gate_up
        self.down = down

    def __call__(self, x: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Run each token through its local experts and sum in ascending expert order -> [T, D]."""
        return reference.experts(x, expert, weight, self.gate_up, self.down)


class CpuPlan:
    """One micro-batch: offsets, page numbers, and the place of every new token."""

    def __init__(
        self, first: NDArray[np.int32], kv_before: NDArray[np.int32], pages: NDArray[np.int32], page_tokens: int
    ) -> None:
        self.first = first
        self.kv_before = kv_before
        self.pages = pages
        self.tokens = int(first[-1])
        self.sequences = len(kv_before)
        count = np.diff(first)
        sequence = np.repeat(np.arange(self.sequences), count)
        position = np.arange(self.tokens) - np.repeat(first[:-1], count) + np.repeat(kv_before, count)
        self.page = torch.from_numpy(pages[sequence, position // page_tokens].astype(np.int64))
        self.slot = torch.from_numpy((position % page_tokens).astype(np.int64))


@dataclass(slots=True)
class CpuExchanged:
    """Tokens that came in one exchange and the way back."""

    x: torch.Tensor
    expert: torch.Tensor
    weight: torch.Tensor
    tokens: int
    sent: torch.Tensor
    sent_counts: NDArray[np.int64]
    received_counts: NDArray[np.int64]


class CpuBackend:
    """The CPU device of one rank."""

    name = "cpu"

    def __init__(self, collective: Collective | None, threads: int) -> None:
        self.device = torch.device("cpu")
        self.collective = collective
        self.threads = threads
        torch.set_num_threads(threads)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised device memory."""
        return torch.empty(shape, dtype=dtype)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Done:
        """Copy `source` into `target` (same shape and dtype); complete on return."""
        target.copy_(source)
        return Done()

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """Prepare weight [N, K] and bias [N]."""
        return CpuLinear(weight, bias)

    def experts(self, gate_up: list[torch.Tensor], down: list[torch.Tensor]) -> Experts:
        """Prepare E experts: gate_up [2 * I, D] each (gate rows first), down [D, I] each; activation SiLU."""
        return CpuExperts(gate_up, down)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [..., D] -> normalised in float32, scaled, in x's dtype."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return weight * scaled.to(x.dtype)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [T, 2 * I] -> silu(gate) * up, [T, I]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate x [T, heads, W] in place in its first 2 * r columns and return it; cos, sin float32 [T, r]."""
        half = cos.shape[-1]
        c, s = cos[:, None, :], sin[:, None, :]
        low, high = x[..., :half].float(), x[..., half : 2 * half].float()
        x[..., :half] = (low * c - high * s).to(x.dtype)
        x[..., half : 2 * half] = (high * c + low * s).to(x.dtype)
        return x

    def plan_attention(
        self, first: NDArray[np.int32], kv_before: NDArray[np.int32], pages: NDArray[np.int32], page_tokens: int
    ) -> CpuPlan:
        """Prepare a micro-batch (see Backend.plan_attention)."""
        return CpuPlan(first, kv_before, pages, page_tokens)

    def append(self, key: torch.Tensor, value: torch.Tensor, layer_pages: torch.Tensor, plan: CpuPlan) -> None:
        """Write key, value [T, G, W] of the new tokens into their places."""
        layer_pages[plan.page, 0, :, plan.slot] = key
        layer_pages[plan.page, 1, :, plan.slot] = value

    def append_latent(self, latent: torch.Tensor, layer_pages: torch.Tensor, plan: CpuPlan) -> None:
        """Write latent [T, L] of the new tokens into their places."""
        layer_pages[plan.page, plan.slot] = latent

    def attend(
        self, query: torch.Tensor, layer_pages: torch.Tensor, plan: CpuPlan, scale: float, window: int
    ) -> torch.Tensor:
        """Causal attention of query [T, H, W] over each sequence's pages -> [T, H, W]."""
        return reference.attend(query, layer_pages, plan.first, plan.kv_before, plan.pages, scale, window)

    def attend_latent(
        self, query: torch.Tensor, layer_pages: torch.Tensor, plan: CpuPlan, scale: float, value_width: int
    ) -> torch.Tensor:
        """Causal attention of query [T, H, L] over latent pages -> [T, H, value_width]."""
        return reference.attend_latent(
            query, layer_pages, plan.first, plan.kv_before, plan.pages, scale, value_width
        )

    def exchange(
        self, x: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor, owner: torch.Tensor, local: torch.Tensor
    ) -> CpuExchanged:
        """Collective over the expert ranks, also with T = 0 (see Backend.exchange)."""
        nothing = np.zeros(0, np.int64)
        if self.collective is None or self.collective.size == 1:
            here = local[expert.long()]
            return CpuExchanged(x, here, weight, len(x), torch.empty(0, dtype=torch.int64), nothing, nothing)
        return self._send(self.collective, x, expert, weight, owner, local)

    def _send(
        self, collective: Collective, x: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor,
        owner: torch.Tensor, local: torch.Tensor,
    ) -> CpuExchanged:
        """Send rows of (x, expert, weight) bytes, ordered by rank, then token."""
        place = owner[expert.long()]  # [T, A]
        ranks = torch.arange(collective.size, dtype=place.dtype)
        wanted = (place[None] == ranks[:, None, None]).any(2)  # [R, T]
        target, token = wanted.nonzero(as_tuple=True)
        counts = wanted.sum(1).numpy().astype(np.int64)
        number = torch.where(place[token] == target[:, None], local[expert[token].long()], -1).to(torch.int32)
        active, wide = expert.shape[1], x.shape[1] * x.element_size()
        rows = torch.empty(len(token), wide + 8 * active, dtype=torch.uint8)
        rows[:, :wide] = x[token].view(torch.uint8)
        rows[:, wide : wide + 4 * active] = number.view(torch.uint8)
        rows[:, wide + 4 * active :] = weight[token].view(torch.uint8)
        incoming = collective.all_to_all_counts(counts)
        arrived = torch.empty(int(incoming.sum()), rows.shape[1], dtype=torch.uint8)
        size = rows.shape[1]
        collective.all_to_all_bytes(rows.view(-1).numpy(), counts * size, arrived.view(-1).numpy(), incoming * size)
        return CpuExchanged(
            arrived[:, :wide].contiguous().view(x.dtype),
            arrived[:, wide : wide + 4 * active].contiguous().view(torch.int32),
            arrived[:, wide + 4 * active :].contiguous().view(torch.float32),
            len(x), token, counts, incoming,
        )

    def give_back(self, exchanged: Exchanged, y: torch.Tensor) -> torch.Tensor:
        """Collective over the expert ranks.  Send y [N, D] back -> [T, D], parts summed in rank order in float32."""
        assert isinstance(exchanged, CpuExchanged), "give_back takes what exchange of the same backend returned"
        if self.collective is None or self.collective.size == 1:
            return y
        size = y.shape[1] * y.element_size()
        parts = torch.empty(len(exchanged.sent), y.shape[1], dtype=y.dtype)
        self.collective.all_to_all_bytes(
            y.contiguous().view(torch.uint8).view(-1).numpy(), exchanged.received_counts * size,
            parts.view(torch.uint8).view(-1).numpy(), exchanged.sent_counts * size,
        )
        total = torch.zeros(exchanged.tokens, y.shape[1], dtype=torch.float32)
        total.index_add_(0, exchanged.sent, parts.float())
        return total.to(y.dtype)
