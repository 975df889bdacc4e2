"""The sparse feed-forward part of one layer: choose, exchange, run the experts, give back, add the shared expert.

The router decides in float32 whatever the model's dtype (cases C35 to C40), because two experts that differ in the
fourth digit must not change places with the batch size.  A library's float32 product does exactly that: its rounding
depends on the shapes, and even two equal router rows can come out unequal.  So the router asks for a steady product,
whose rows each depend on themselves alone; an exact tie then is one, and goes to the lower expert number.  Rejected: a
product accumulated in float64, which costs ten times as much and leaves one chance in some hundred millions.

Experts are split over the ranks (`split_experts`); tokens travel, weights do not.  Every rank enters every exchange, a
rank without tokens with zero rows.  T tokens, D hidden, E experts, A experts a token activates, I expert width.
"""

from __future__ import annotations

from typing import Protocol

import torch

from bgmpi.architecture import GroupScore, Moe, Scoring, split_experts
from bgmpi.attention import ReadWeight
from bgmpi.kernels.backend import Backend, Experts

_TINY = 1e-20
_FEW_NUMBERS = 2048


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Return 1 / (1 + exp(-x)).  torch's own takes another way for the last few numbers of a tensor."""
    return x.neg().exp_().add_(1.0).reciprocal_()


class Router:
    """Chooses the experts of each token and how much each weighs."""

    def __init__(self, moe: Moe, weight: torch.Tensor, bias: torch.Tensor | None, backend: Backend) -> None:
        """Take weight float32 [E, D]; bias float32 [E] decides who is chosen, never how much it weighs."""
        self.moe = moe
        self.product = backend.linear(weight, steady=True)
        self.bias = bias
        self.later = torch.arange(moe.experts - 1, -1, -1, device=weight.device)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Route x [T, D] -> expert int32 [T, A], weight float32 [T, A]."""
        return self.choose(self.product(x.float()))

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn logits float32 [T, E] -> expert int32 [T, A], weight float32 [T, A]."""
        moe = self.moe
        if moe.scoring is Scoring.SIGMOID:
            scores = sigmoid(logits)
            worth = scores if self.bias is None else scores + self.bias
        else:
            # Softmax keeps the order of the logits, and they tie only where they are equal.
            scores = logits
            worth = logits if self.bias is None else logits.softmax(-1) + self.bias
        if moe.groups > 1:
            worth = self._best_groups(worth)
        expert = self._best(worth, moe.top_k, self.later)
        return expert.int(), self._weigh(scores, expert)

    def _weigh(self, scores: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        """Weigh the chosen experts, the selection bias left out."""
        moe = self.moe
        if moe.scoring is Scoring.SOFTMAX and moe.normalise:
            weight = scores.gather(1, expert).softmax(-1)
        else:
            weight = (scores.softmax(-1) if moe.scoring is Scoring.SOFTMAX else scores).gather(1, expert)
            if moe.normalise:
                weight = weight / (weight.sum(-1, keepdim=True) + _TINY)
        return weight if moe.scaling == 1.0 else weight * moe.scaling

    def _best_groups(self, worth: torch.Tensor) -> torch.Tensor:
        """Put the experts outside the best groups out of reach."""
        moe = self.moe
        grouped = worth.view(len(worth), moe.groups, moe.experts // moe.groups)  # [T, groups, E / groups]
        if moe.group_score is GroupScore.BEST_TWO:
            group_worth = grouped.topk(min(2, grouped.shape[2]), dim=-1)[0].sum(-1)
        else:
            group_worth = grouped.amax(-1)
        best = self._best(group_worth, moe.top_groups, self.later[-moe.groups :])
        closed = torch.ones_like(group_worth, dtype=torch.bool).scatter_(1, best, False)
        return grouped.masked_fill(closed[..., None], -torch.inf).view(worth.shape)

    @staticmethod
    def _best(worth: torch.Tensor, count: int, later: torch.Tensor) -> torch.Tensor:
        """Return the places of the `count` largest, best first, ties to the lower place: int64 [T, count].

        topk promises nothing about ties.  A stable sort is exact and quickest for a few numbers; for many it costs up
        to ten times as much as topk, so there float32 is mapped to integers of the same order and the place, counted
        down by `later` int64 [n], becomes the last digit.  Adding 0.0 makes one zero of the two.
        """
        if worth.numel() <= _FEW_NUMBERS:
            return worth.sort(dim=-1, descending=True, stable=True)[1][:, :count]
        bits = (worth + 0.0).view(torch.int32)
        ordered = (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)
        return ordered.long().mul_(len(later)).add_(later).topk(count, dim=-1)[1]


class FeedForward(Protocol):
    """The feed-forward part of one layer, or its shared expert."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [T, D] -> [T, D]."""


class DenseFeedForward:
    """The gated feed-forward block that every token visits: a dense layer, or a sparse layer's shared expert."""

    def __init__(self, read: ReadWeight, backend: Backend, prefix: str = "", bias: bool = False) -> None:
        self.backend = backend
        first, second = f"{prefix}gate", f"{prefix}up"
        both = read(f"{first}_bias", f"{second}_bias") if bias else None
        self.gate_up = backend.linear(read(first, second), both)
        self.down = backend.linear(read(f"{prefix}down"), read(f"{prefix}down_bias") if bias else None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [T, D] -> [T, D].  Local."""
        return self.down(self.backend.silu_mul(self.gate_up(x)))


def resident_experts(read: ReadWeight, backend: Backend, mine: range) -> Experts:
    """Take the weights of the experts `mine`, which stay in memory."""
    return backend.experts(
        [read("expert_gate", "expert_up", expert=expert) for expert in mine],
        [read("expert_down", expert=expert) for expert in mine],
    )


class SparseFeedForward:
    """Routed experts spread over all ranks, and the shared expert of this rank's own tokens."""

    def __init__(
        self, moe: Moe, read: ReadWeight, backend: Backend, rank: int, ranks: int, routed: torch.Tensor,
        experts: Experts | None = None, shared: FeedForward | None = None,
    ) -> None:
        """Take the router and the experts that `rank` owns; `routed` int64 [E] counts this rank's tokens by expert.

        experts, shared: those that do not stay in memory, None to read them here.
        """
        self.moe, self.backend, self.routed = moe, backend, routed
        bias = read("selection_bias", dtype=torch.float32) if moe.selection_bias else None
        self.router = Router(moe, read("router", dtype=torch.float32), bias, backend)
        spans = split_experts(moe.experts, ranks)
        self.experts = experts or resident_experts(read, backend, range(*spans[rank]))
        sizes = torch.tensor([end - begin for begin, end in spans])
        self.owner = torch.arange(ranks, dtype=torch.int32).repeat_interleave(sizes).to(backend.device)
        self.local = torch.cat([torch.arange(size, dtype=torch.int32) for size in sizes]).to(backend.device)
        self.shared = (shared or DenseFeedForward(read, backend, "shared_")) if moe.shared else None
        self.switch = backend.linear(read("shared_switch")) if moe.shared_gate else None
        self._ones = torch.ones(1, dtype=torch.int64, device=backend.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Collective over the expert ranks, also with T = 0.  x [T, D] -> [T, D]."""
        result = self.visit(x)
        return result if self.shared is None else self.add_shared(x, result, self.shared(x))

    def visit(self, x: torch.Tensor) -> torch.Tensor:
        """Collective over the expert ranks, also with T = 0.  Let each token visit its routed experts alone."""
        backend = self.backend
        expert, weight = self.router(x)
        self.routed.scatter_add_(0, expert.view(-1).long(), self._ones.expand(expert.numel()))
        arrived = backend.exchange(x, expert, weight, self.owner, self.local)
        return backend.give_back(arrived, self.experts(arrived.x, arrived.expert, arrived.weight))

    def add_shared(self, x: torch.Tensor, routed: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        """Add what the shared expert made of x to what the routed ones did, switched where the model has a switch."""
        return routed + (shared if self.switch is None else shared * sigmoid(self.switch(x).float()).to(x.dtype))
