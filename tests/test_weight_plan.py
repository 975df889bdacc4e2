"""What stays and what streams fits the budget, every weight is in exactly one place, and a ring never loses order."""

from __future__ import annotations

from collections import deque
from math import prod

import checkpoints
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bgmpi import weight_plan
from bgmpi.architecture import Architecture
from bgmpi.errors import InternalError, UsageError
from bgmpi.families import read_architecture
from bgmpi.tensor_names import expected_tensors
from bgmpi.weight_plan import ByteRing, Part, plan_weights, weight_bytes, weight_units

MIXTRAL = {
    "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 2048, "num_hidden_layers": 16,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "num_local_experts": 16,
    "num_experts_per_tok": 2, "intermediate_size": 2560, "max_position_embeddings": 2048,
}
DEEPSEEK = {
    "model_type": "deepseek_v3", "vocab_size": 1000, "hidden_size": 256, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 8, "kv_lora_rank": 64, "q_lora_rank": 96, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 4,
    "n_group": 4, "topk_group": 2, "moe_intermediate_size": 128, "first_k_dense_replace": 1, "intermediate_size": 512,
    "max_position_embeddings": 512,
}
ARCHS = [read_architecture(MIXTRAL), read_architecture(DEEPSEEK)]


@pytest.fixture
def small_ring(monkeypatch):
    monkeypatch.setattr(weight_plan, "WANTED", 0)


def passing(arch: Architecture, rank: int, ranks: int) -> list[str]:
    return [name for unit in weight_units(arch, rank, ranks) for group in unit.groups
            for name in unit.names(arch, group)]


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_every_matrix_but_embedding_and_routers_is_in_one_unit_of_one_rank(family):
    arch = read_architecture(checkpoints.build(family).config.to_dict())
    once = passing(arch, 0, 1)
    assert len(once) == len(set(once))
    left = {name: shape for name, shape in expected_tensors(arch).items() if name not in once}
    assert all(
        len(shape) == 1 or min(shape) == 1 or "embed_tokens" in name or name.endswith("gate.weight")
        for name, shape in left.items()
    )


@pytest.mark.parametrize("arch", ARCHS)
def test_ranks_share_the_experts_and_nothing_else(arch):
    whole = set(passing(arch, 0, 1))
    parts = [set(passing(arch, rank, 3)) for rank in range(3)]
    assert set.union(*parts) == whole
    assert all(".experts." not in name for name in parts[0] & parts[1])


@pytest.mark.parametrize("arch", ARCHS)
def test_the_bytes_of_one_rank_are_those_of_the_checkpoint_and_wider_routers(arch):
    numbers = sum(prod(shape) for shape in expected_tensors(arch).values())
    routers = sum(prod(shape) for name, shape in expected_tensors(arch).items() if name.endswith("gate.weight")
                  and len(shape) == 2)
    assert weight_bytes(arch, 0, 1, 2) == 2 * numbers + 6 * routers
    assert sum(weight_bytes(arch, rank, 4, 2) for rank in range(4)) < 4 * weight_bytes(arch, 0, 1, 2)


@pytest.mark.parametrize("arch", ARCHS)
def test_without_a_budget_or_with_enough_all_stays(arch):
    whole = weight_bytes(arch, 0, 1, 2)
    for budget in (None, whole, 2 * whole):
        plan = plan_weights(arch, 0, 1, 2, budget)
        assert (plan.streamed, plan.ring_bytes, plan.resident_bytes) == ((), 0, whole)


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_a_plan_fits_its_budget_and_its_ring_takes_each_unit(data):
    arch = data.draw(st.sampled_from(ARCHS))
    rank, ranks = data.draw(st.sampled_from([(0, 1), (1, 3)]))
    whole = weight_bytes(arch, rank, ranks, 2)
    budget = data.draw(st.integers(0, whole - 1))
    try:
        plan = plan_weights(arch, rank, ranks, 2, budget)
    except UsageError as error:
        assert f"{budget:,}" in str(error)
        return
    assert plan.streamed and plan.resident_bytes + plan.ring_bytes <= budget
    units = weight_units(arch, rank, ranks)
    assert list(plan.streamed) == [unit for unit in units if unit in set(plan.streamed)], "order of a sweep"
    ring = ByteRing(plan.ring_bytes)
    for unit in plan.streamed:
        numbers = sum(prod(expected_tensors(arch)[name]) for group in unit.groups for name in unit.names(arch, group))
        assert ring.allocate(2 * numbers + 2 * 4096 * len(unit.groups)) is not None
        ring.free()


def test_the_budget_that_a_refusal_names_is_enough():
    for arch in ARCHS:
        with pytest.raises(UsageError, match="give at least ") as refused:
            plan_weights(arch, 0, 1, 2, 0)
        enough = int(str(refused.value).split("give at least ")[1].split(" ")[0].replace(",", ""))
        assert plan_weights(arch, 0, 1, 2, enough).streamed


def test_attention_stays_before_dense_blocks_and_the_head_and_experts_go_first():
    arch = ARCHS[0]
    plan = plan_weights(arch, 0, 1, 2, 1 << 30)
    assert {unit.part for unit in plan.streamed} == {Part.EXPERT}
    assert plan.ring_bytes == weight_plan.WANTED
    tight = plan_weights(arch, 0, 1, 2, 720 << 20)
    assert {unit.part for unit in tight.streamed} == {Part.EXPERT, Part.HEAD}


def test_experts_that_stay_are_spread_over_the_sweep(small_ring):
    arch = ARCHS[0]
    plan = plan_weights(arch, 0, 1, 2, 5 << 30)
    streamed = {(unit.layer, unit.expert) for unit in plan.streamed}
    stay = [sum((layer, expert) not in streamed for expert in range(16)) for layer in range(16)]
    assert sum(stay) > 100 and max(stay) - min(stay) <= 2


@settings(deadline=None)
@given(st.integers(1, 64), st.lists(st.one_of(st.none(), st.integers(1, 24)), max_size=80))
def test_pieces_of_a_ring_never_overlap_and_an_empty_ring_takes_what_is_not_larger(size, deeds):
    ring, held = ByteRing(size), deque()
    for wanted in deeds:
        if wanted is None:
            if held:
                held.popleft()
                ring.free()
            continue
        begin = ring.allocate(wanted)
        if begin is None:
            assert held or wanted > size
            continue
        assert 0 <= begin <= size - wanted, "never split"
        assert all(begin + wanted <= low or high <= begin for low, high in held)
        held.append((begin, begin + wanted))


def test_giving_back_what_nobody_holds_is_a_fault():
    with pytest.raises(InternalError, match="nobody holds"):
        ByteRing(8).free()
