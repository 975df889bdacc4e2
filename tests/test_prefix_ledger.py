"""Who is told that more will come for a prefix hears once that nobody comes any more, and nobody else does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bgmpi.errors import InternalError
from bgmpi.prefix_ledger import PrefixLedger
from bgmpi.share_plan import SharePlan, sums_below


@st.composite
def plans(draw: st.DrawFn) -> tuple[SharePlan, np.ndarray]:
    """Draw a forest in preorder and prompts with sequences below its nodes."""
    parent: list[int] = []
    path: list[int] = []
    for node in range(draw(st.integers(0, 8))):
        path = path[: draw(st.integers(0, len(path)))]
        parent.append(path[-1] if path else -1)
        path.append(node)
    depth = np.zeros(len(parent) + 1, np.int32)
    for node, above in enumerate(parent):
        depth[node] = depth[above] + 1 + node % 3
    node = draw(st.lists(st.integers(-1, len(parent) - 1), max_size=12))
    weight = np.array(draw(st.lists(st.integers(0, 3), min_size=len(node), max_size=len(node))), np.int32)
    unit = draw(st.lists(st.integers(0, 3), min_size=len(node), max_size=len(node)))
    units = np.where(weight > 0, np.array(unit, np.int32), np.int32(-1))
    plan = SharePlan(depth[:-1], np.array(parent, np.int32), np.array(node, np.int32), units, 4, 0, 0, 0)
    return plan, weight


@given(plans())
def test_sequences_are_counted_below_every_node_of_their_path(drawn: tuple[SharePlan, np.ndarray]) -> None:
    plan, weight = drawn
    below = [0] * len(plan.depth)
    for prompt, sequences in enumerate(weight.tolist()):
        for node in plan.path(prompt):
            below[node] += sequences
    assert sums_below(plan.parent, plan.node, weight).tolist() == below


@given(plans(), st.randoms(use_true_random=False))
def test_a_prefix_is_closed_once_if_anybody_was_told_of_more(drawn: tuple[SharePlan, np.ndarray], random) -> None:
    plan, weight = drawn
    ledger = PrefixLedger(plan, weight)
    left = weight.copy()
    told: set[int] = set()
    closed: list[int] = []
    coming = [prompt for prompt, count in enumerate(weight.tolist()) for _ in range(count)]
    random.shuffle(coming)
    while coming:
        some = [coming.pop() for _ in range(min(len(coming), random.randrange(1, 4)))]
        for prompt in some:
            left[prompt] -= 1
            ledger.leave(prompt, 1)
        open_nodes = {node for prompt in np.flatnonzero(left).tolist() for node in plan.path(prompt)}
        for prompt in some if random.random() < 0.7 else ():  # else their row was refused
            prefixes = ledger.prefixes(prompt)
            assert [one.number for one in prefixes] == plan.path(prompt)
            assert [one.depth for one in prefixes] == [plan.depth[node] for node in plan.path(prompt)]
            assert [one.more for one in prefixes] == [node in open_nodes for node in plan.path(prompt)]
            told |= {one.number for one in prefixes if one.more}
        now = ledger.take_closed()
        assert not open_nodes.intersection(now)
        closed += now
        ledger.check()
    assert sorted(closed) == sorted(told)


def test_who_was_never_there_cannot_leave() -> None:
    plan = SharePlan(*(np.array(x, np.int32) for x in ([3], [-1], [0], [0])), 1, 0, 0, 0)
    ledger = PrefixLedger(plan, np.array([2], np.int32))
    ledger.leave(0, 3)
    with pytest.raises(InternalError, match="1 more sequences left prefix 0"):
        ledger.check()
