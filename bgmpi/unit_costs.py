"""What the prompts of a plan cost when each is computed behind the others of its unit."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bgmpi.primitives import Counts
from bgmpi.share_plan import SharePlan


def own_tokens(plan: SharePlan, weight: NDArray[np.int32], length: NDArray[np.int32]) -> Counts:
    """Return the tokens that the sequences of each prompt compute, int64 [prompts], 0 for one without sequences.

    weight: sequences of each prompt; length: its tokens; both int32 [prompts].  A unit is taken to stand alone, its
    prompts in tree order, so its first one pays also for what the unit shares with others.
    """
    order = np.lexsort((plan.node, plan.unit))
    order = order[np.searchsorted(plan.unit[order], 0) :]
    node, unit = plan.node[order], plan.unit[order]
    depth = np.append(plan.depth, np.int32(0)).astype(np.int64)  # [-1]: no node
    shared = np.zeros(len(order), np.int64)
    behind = np.flatnonzero(unit[1:] == unit[:-1]) + 1
    shared[behind] = depth[_common(plan.parent, node[behind - 1], node[behind])]
    tokens = length[order].astype(np.int64)
    own = np.zeros(len(weight), np.int64)
    own[order] = tokens - shared + (weight[order] - 1) * (tokens - depth[node])
    return own


def _common(parent: NDArray[np.int32], one: NDArray[np.int32], other: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the deepest node on the paths of both, int32 [k], -1 for none.  Nodes stand behind their parents."""
    one, other = one.copy(), other.copy()
    apart = np.flatnonzero(one != other)
    while len(apart):
        climbs = one[apart] > other[apart]
        ones, others = apart[climbs], apart[~climbs]
        one[ones] = parent[one[ones]]
        other[others] = parent[other[others]]
        apart = apart[one[apart] != other[apart]]
    return one
