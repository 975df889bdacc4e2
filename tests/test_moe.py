"""Routing follows its definition to the last tie; experts split over ranks compute what one rank computes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from bgmpi.architecture import GroupScore, Moe, Scoring
from bgmpi.kernels.cpu import CpuBackend
from bgmpi.moe import Router, SparseFeedForward

HIDDEN = 32
BACKEND = CpuBackend(None, 1)
KINDS = {
    "mixtral": Moe(8, 2, 16, normalise=True),
    "qwen2": Moe(12, 4, 16),
    "qwen3": Moe(12, 4, 16, normalise=True),
    "v2 greedy": Moe(16, 4, 16, scaling=1.5),
    "v2 grouped": Moe(16, 4, 16, groups=4, top_groups=2, group_score=GroupScore.BEST, scaling=1.5),
    "v3": Moe(16, 4, 16, Scoring.SIGMOID, True, 4, 2, GroupScore.BEST_TWO, 2.5, True),
    "v3 lone experts": Moe(8, 2, 16, Scoring.SIGMOID, True, 8, 4, GroupScore.BEST_TWO, 2.5, True),
    "kimi": Moe(16, 4, 16, Scoring.SIGMOID, True, scaling=2.8, selection_bias=True),
    "softmax with bias": Moe(16, 4, 16, Scoring.SOFTMAX, True, selection_bias=True),
}


def by_definition(moe: Moe, logits: list[float], bias: list[float]) -> dict[int, float]:
    """Route one token in plain Python: expert -> weight."""
    row = torch.tensor(logits)
    scores = (row.sigmoid() if moe.scoring is Scoring.SIGMOID else row.softmax(0)).tolist()
    worth = [score + bonus for score, bonus in zip(scores, bias, strict=True)]
    size = moe.experts // moe.groups
    parts = [worth[group * size : (group + 1) * size] for group in range(moe.groups)]
    count = 2 if moe.group_score is GroupScore.BEST_TWO else 1
    value = [sum(sorted(part)[-count:]) for part in parts]
    open_groups = sorted(range(moe.groups), key=lambda group: (-value[group], group))[: moe.top_groups]
    allowed = [expert for expert in range(moe.experts) if expert // size in open_groups]
    chosen = sorted(allowed, key=lambda expert: (-worth[expert], expert))[: moe.top_k]
    total = sum(scores[expert] for expert in chosen) + 1e-20 if moe.normalise else 1.0
    return {expert: scores[expert] / total * moe.scaling for expert in chosen}


@pytest.mark.parametrize("kind", KINDS)
def test_routing_follows_its_definition(kind):
    moe, draw = KINDS[kind], torch.Generator().manual_seed(3)
    weight = torch.randn(moe.experts, HIDDEN, generator=draw)
    bias = torch.randn(moe.experts, generator=draw) if moe.selection_bias else None
    x = torch.randn(40, HIDDEN, generator=draw)
    expert, share = Router(moe, weight, bias, BACKEND)(x)
    assert expert.dtype == torch.int32 and share.dtype == torch.float32
    logits = (x.double() @ weight.double().T).float()
    for token in range(len(x)):
        bonus = [0.0] * moe.experts if bias is None else bias.tolist()
        wanted = by_definition(moe, logits[token].tolist(), bonus)
        got = dict(zip(expert[token].tolist(), share[token].tolist(), strict=True))
        assert got == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_logits_go_to_the_lower_experts(kind):
    moe = KINDS[kind]
    bias = torch.zeros(moe.experts) if moe.selection_bias else None
    expert, _ = Router(moe, torch.zeros(moe.experts, HIDDEN), bias, BACKEND)(torch.ones(3, HIDDEN))
    assert expert.tolist() == [list(range(moe.top_k))] * 3


def test_the_order_of_floats_is_kept_where_they_are_negative_zero_or_infinite():
    values = torch.tensor([[-0.0, 0.0, -1e-45, -torch.inf, torch.inf, 1e-45, -3.5, -3.5]])
    later = torch.arange(7, -1, -1)
    for tokens in (1, 1000):
        places = Router._best(values.expand(tokens, -1), 8, later)
        assert places.tolist() == [[4, 5, 0, 1, 2, 6, 7, 3]] * tokens


def test_few_and_many_tokens_are_ordered_alike():
    values = torch.randn(500, 16, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    later = torch.arange(15, -1, -1)
    one_by_one = torch.cat([Router._best(row, 5, later) for row in values.split(1)])
    assert torch.equal(Router._best(values, 5, later), one_by_one)


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_routing_takes_any_number_of_tokens(tokens):
    for moe in KINDS.values():
        bias = torch.zeros(moe.experts) if moe.selection_bias else None
        expert, share = Router(moe, torch.randn(moe.experts, HIDDEN), bias, BACKEND)(torch.randn(tokens, HIDDEN))
        assert expert.shape == share.shape == (tokens, moe.top_k)


class OneOfMany(CpuBackend):
    """A rank whose exchange keeps what this rank owns: all ranks' parts together are what the exchange returns."""

    def __init__(self, rank: int) -> None:
        super().__init__(None, 1)
        self.rank = rank

    def exchange(self, x, expert, weight, owner, local):
        here = torch.where(owner[expert.long()] == self.rank, local[expert.long()], -1)
        return SimpleNamespace(x=x, expert=here, weight=weight)

    def give_back(self, exchanged, y):
        return y


def reader(moe: Moe):
    draw = torch.Generator().manual_seed(5)
    shapes = {
        "router": (moe.experts, HIDDEN), "selection_bias": (moe.experts,), "expert_gate": (moe.width, HIDDEN),
        "expert_up": (moe.width, HIDDEN), "expert_down": (HIDDEN, moe.width), "shared_gate": (24, HIDDEN),
        "shared_up": (24, HIDDEN), "shared_down": (HIDDEN, 24), "shared_switch": (1, HIDDEN),
    }
    made = {
        (role, expert): 0.3 * torch.randn(shape, generator=draw)
        for role, shape in shapes.items() for expert in range(moe.experts)
    }
    return lambda *roles, expert=0, dtype=None: torch.cat([made[role, expert] for role in roles])


def build(moe: Moe, backend, rank: int = 0, ranks: int = 1) -> SparseFeedForward:
    return SparseFeedForward(moe, reader(moe), backend, rank, ranks, torch.zeros(moe.experts, dtype=torch.int64))


@pytest.mark.parametrize("ranks", [2, 3, 5, 11])
def test_experts_split_over_ranks_compute_what_one_rank_computes(ranks):
    moe, x = KINDS["mixtral"], torch.randn(13, HIDDEN, generator=torch.Generator().manual_seed(1))
    parts = [build(moe, OneOfMany(rank), rank, ranks)(x) for rank in range(ranks)]
    whole = build(moe, CpuBackend(None, 1))(x)
    assert torch.allclose(torch.stack(parts).sum(0), whole, atol=1e-5)


def test_owners_and_local_numbers_name_every_expert_once():
    layer = build(KINDS["mixtral"], OneOfMany(1), 1, 3)
    assert layer.owner.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert layer.local.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert layer.owner.dtype == layer.local.dtype == torch.int32


@pytest.mark.parametrize("gated", [False, True])
def test_the_shared_expert_is_added_to_every_token(gated):
    plain = Moe(8, 2, 16, normalise=True)
    shared = Moe(8, 2, 16, normalise=True, shared=24, shared_gate=gated)
    x, read = torch.randn(6, HIDDEN), reader(shared)
    added = build(shared, CpuBackend(None, 1))(x) - build(plain, CpuBackend(None, 1))(x)
    gate, up, down = (read(role) for role in ("shared_gate", "shared_up", "shared_down"))
    wanted = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    if gated:
        wanted = wanted * (x @ read("shared_switch").T).sigmoid()
    assert torch.allclose(added, wanted, atol=1e-5)


def test_tokens_are_counted_once_for_each_expert_that_they_visit():
    layer = build(KINDS["qwen2"], CpuBackend(None, 1))
    x = torch.randn(6, HIDDEN)
    layer(x), layer(x[:0])
    expert, _ = layer.router(x)
    assert torch.equal(layer.routed, torch.bincount(expert.flatten(), minlength=12))
