"""How a step is cut: micro-batches of B_attn that YIELD, expert batches of B_moe that COMBINE, all agreed before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bgmpi.backlog import Entry
from bgmpi.coroutine import Module
from bgmpi.executor import Executor, Shape
from bgmpi.kv_places import KvPlaces
from bgmpi.kv_stream import KvStream
from bgmpi.step_plan import StepPlan

LAYERS = 3


class Recorder:
    """Stands for model and backend: notes every call and adds a little to the rows, so that order shows."""

    layers = LAYERS
    streams = False
    arch = SimpleNamespace(hidden=4)

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []
        self.plans: list[tuple[list[int], list[int]]] = []

    def is_collective(self, layer: int) -> bool:
        return layer > 0

    def page_shape(self, page_tokens: int) -> tuple[int, ...]:
        return (page_tokens, 1)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def plan_attention(self, first: Any, before: Any, pages: Any, page_tokens: int) -> Any:
        self.plans.append((first.tolist(), before.tolist()))
        return SimpleNamespace(tokens=int(first[-1]), sequences=len(before))

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return ids[:, None].expand(-1, 4).float()

    @contextmanager
    def attention_of(self, layer: int) -> Iterator[Any]:
        def attend(hidden: torch.Tensor, positions: torch.Tensor, plan: Any, pages: torch.Tensor) -> None:
            assert len(hidden) == len(positions) == plan.tokens
            self.calls.append(("attend", layer, len(hidden)))
            hidden += 0.5

        yield attend

    def feed_forward(self, layer: int, hidden: torch.Tensor) -> None:
        self.calls.append(("experts", layer, len(hidden)))
        hidden += 2


def plan_of(counts: list[int], before: list[int], resident: int | None = None) -> StepPlan:
    first = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    positions = np.concatenate([np.arange(b, b + c) for b, c in zip(before, counts, strict=True)])
    return StepPlan(
        np.arange(len(counts)), first, np.array(before, np.int32), np.arange(first[-1]), positions,
        np.ones(len(counts), bool), len(counts) if resident is None else resident,
    )  # fmt: skip


def run(shape: Shape, plan: StepPlan | None, most: int) -> tuple[Recorder, Executor, torch.Tensor]:
    seen = Recorder()
    places = KvPlaces(slots=8, page_tokens=4, pages=64)
    for slot, tokens in enumerate(plan.before + np.diff(plan.first) if plan is not None else ()):
        assert places.open(slot, Entry(slot, np.zeros(int(tokens), np.int32), int(tokens), int(tokens)), 0)
    home = torch.zeros(64, LAYERS, 4, 1)
    kv = KvStream(seen, home, device_pages=None, buffer_pages=0, buffers=0, spill=None)  # type: ignore[arg-type]
    executor = Executor(seen, seen, kv, places, torch.zeros(64, 4), shape=shape, slots=8)  # type: ignore[arg-type]
    hidden = executor.step(plan, most)
    return seen, executor, hidden


def test_experts_run_as_soon_as_enough_tokens_have_gathered() -> None:
    seen, _, _ = run(Shape(b_attn=2, b_moe=4), plan_of([5, 1], [0, 3]), most=6)
    first_layer = [(what, size) for what, layer, size in seen.calls if layer == 1]
    assert first_layer == [("attend", 2), ("attend", 2), ("experts", 4), ("attend", 2), ("experts", 2)]


def test_a_long_chunk_is_cut_and_each_piece_sees_the_kv_of_those_before() -> None:
    seen, _, _ = run(Shape(b_attn=3, b_moe=0), plan_of([5, 1], [10, 3]), most=6)
    assert seen.plans == [([0, 3], [10]), ([0, 2, 3], [13, 3])]


def test_a_rank_without_tokens_enters_every_exchange_and_no_dense_layer() -> None:
    seen, _, _ = run(Shape(b_attn=4, b_moe=4), None, most=9)
    assert seen.calls == [("experts", layer, 0) for layer in (1, 2) for _ in range(3)]


def test_an_atomic_pass_takes_each_micro_batch_through_all_layers_alone() -> None:
    seen, _, _ = run(Shape(b_attn=4, b_moe=0, yield_points=False), plan_of([6], [0]), most=6)
    assert [layer for what, layer, _ in seen.calls if what == "attend"] == [0, 1, 2, 0, 1, 2]


def test_a_yield_leaves_the_position_and_nothing_else() -> None:
    _, executor, _ = run(Shape(b_attn=4, b_moe=0), plan_of([2, 1], [0, 0]), most=3)
    assert executor.at_layer[:2].tolist() == [LAYERS - 1] * 2
    assert executor.at_module[:2].tolist() == [Module.EXPERTS] * 2
    assert executor.at_layer[2] == -1


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 12), st.integers(0, 12), st.integers(0, 20),
    st.booleans(),
)  # fmt: skip
@settings(deadline=None, max_examples=150)
def test_every_token_meets_every_module_once_and_exchanges_are_as_agreed(
    counts: list[int], b_attn: int, b_moe: int, others: int, yields: bool
) -> None:
    shape = Shape(b_attn, b_moe, yields)
    tokens = sum(counts)
    most = max(tokens, others)
    seen, executor, hidden = run(shape, plan_of(counts, [0] * len(counts)), most)
    np.testing.assert_allclose(hidden[:, 0].numpy(), np.arange(tokens) + 2.5 * LAYERS)
    for layer in range(LAYERS):
        assert sum(size for what, at, size in seen.calls if (what, at) == ("attend", layer)) == tokens
        assert sum(size for what, at, size in seen.calls if (what, at) == ("experts", layer)) == tokens
    agreed = shape.passes(most) * shape.expert_batches(most) * (LAYERS - 1)
    assert executor.expert_batches == agreed
    idle, _, _ = run(shape, None, most)
    assert len(idle.calls) == agreed
