"""Laws of the collapse to one level: the exact choice is the best of all, and the greedy one is never better."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import assume, given, settings
from numpy.typing import NDArray
from prompts_for_tests import Prompts, jobs

from bgmpi.prefix_groups import best_groups, lifted_groups
from bgmpi.prefix_tree import PrefixTree
from bgmpi.share_plan import share_plan


def cost(job: Prompts, tree: PrefixTree, used: NDArray[np.bool_]) -> int:
    """Count the tokens, prompt by prompt, each behind the deepest used node on its path."""
    total = int(tree.depth[used].sum())
    for prompt, (tokens, weight) in enumerate(zip(job.tokens, job.weights, strict=True)):
        node = int(tree.node[prompt])
        while node >= 0 and not used[node]:
            node = int(tree.parent[node])
        total += weight * (len(tokens) + 1 - (int(tree.depth[node]) if node >= 0 else 0))
    return total


@given(jobs())
@settings(max_examples=100)
def test_the_exact_choice_costs_the_least_of_all_choices(job: Prompts) -> None:
    tree = job.tree()
    assume(len(tree.depth) <= 9)
    all_choices = (np.array(used, bool) for used in product([False, True], repeat=len(tree.depth)))
    assert cost(job, tree, best_groups(tree)) == min(cost(job, tree, used) for used in all_choices)


@given(jobs(40, 5))
@settings(max_examples=100)
def test_multi_level_costs_at_most_exact_and_exact_at_most_greedy(job: Prompts) -> None:
    tree = job.tree()
    plan = share_plan(tree, job.weight, job.length, mode="one-level", least_tokens=1)
    assert plan.computed == cost(job, tree, best_groups(tree))
    assert plan.optimum <= plan.computed <= cost(job, tree, lifted_groups(tree)) <= plan.logical


def test_every_used_node_is_worth_its_tokens() -> None:
    job = Prompts([(1,) * 9 + (one, 0) for one in range(6)], [6] * 6)
    tree = job.tree()
    assert tree.depth[best_groups(tree)].tolist() == [11] * 6
    job = Prompts([(1,) * 9 + (one, 0) for one in range(6)], [1] * 6)
    assert job.tree().depth[best_groups(job.tree())].tolist() == [9]


def test_the_greedy_is_worse_where_several_must_move_at_once() -> None:
    # No child alone is worth the four tokens above it that would be computed again: (2 - 1) * 4 is not more than 4.
    # Once all three are lifted the four tokens above are computed for nobody else.
    job = Prompts([(1,) * 4 + (child,) * 4 + (leaf,) for child in range(3) for leaf in range(2)], [1] * 6)
    tree = job.tree()
    assert tree.depth[lifted_groups(tree)].tolist() == [4]
    assert tree.depth[best_groups(tree)].tolist() == [8, 8, 8]
    assert cost(job, tree, best_groups(tree)) < cost(job, tree, lifted_groups(tree))


def test_the_greedy_lifts_what_pays_and_merges_what_is_left() -> None:
    job = Prompts([(1, 1, 2, 2, 2, leaf) for leaf in range(4)] + [(1, 1, 3)], [1] * 5)
    tree = job.tree()
    assert tree.depth[lifted_groups(tree)].tolist() == [5]
    job = Prompts([(1, 1, 2, 2, 2, leaf) for leaf in range(4)] + [(1, 1, 3), (1, 1, 4)], [1] * 6)
    tree = job.tree()
    assert tree.depth[lifted_groups(tree)].tolist() == [2, 5]
