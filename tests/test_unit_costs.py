"""What the prompts of a unit compute is every shared edge once, and what each has behind it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from test_prefix_ledger import plans

from bgmpi.share_plan import SharePlan
from bgmpi.unit_costs import own_tokens


@given(plans())
def test_a_unit_costs_every_edge_once_and_what_lies_behind_for_each(drawn: tuple[SharePlan, np.ndarray]) -> None:
    plan, weight = drawn
    beyond = np.arange(len(weight)) % 4 + 1
    length = (np.append(plan.depth, 0)[plan.node] + beyond).astype(np.int32)
    own = own_tokens(plan, weight, length)
    depth = [*plan.depth.tolist(), 0]
    for unit in range(4):
        prompts = np.flatnonzero(plan.unit == unit).tolist()
        edges = {node for prompt in prompts for node in plan.path(prompt)}
        cost = sum(depth[node] - depth[plan.parent[node]] for node in edges)
        cost += sum(int(weight[one]) * (int(length[one]) - depth[plan.node[one]]) for one in prompts)
        assert own[prompts].sum() == cost
    assert not own[weight == 0].any()
