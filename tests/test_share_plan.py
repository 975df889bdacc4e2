"""Laws of the share plan: its costs are those of a slow count, and its units keep together what shares."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prompts_for_tests import Prefix, Prompts, jobs

from bgmpi.errors import UsageError
from bgmpi.share_plan import SharePlan, share_plan

MODES = st.sampled_from(["multi-level", "one-level"])


def planned(job: Prompts, mode: str = "multi-level", least_tokens: int = 1, most: int = 4) -> SharePlan:
    return share_plan(job.tree(), job.weight, job.length, mode=mode, least_tokens=least_tokens, unit_sequences=most)


def chains(job: Prompts, plan: SharePlan) -> list[list[Prefix]]:
    """Return the prefixes that each prompt begins with."""
    return [[job.tokens[one][: plan.depth[node]] for node in plan.path(one)] for one in range(len(job.tokens))]


@given(jobs(), MODES, st.integers(1, 4))
@settings(max_examples=100)
def test_computed_counts_each_prefix_once_and_the_rest_of_each_sequence(
    job: Prompts, mode: str, least_tokens: int
) -> None:
    plan = planned(job, mode, least_tokens)
    edges: dict[Prefix, int] = {}
    computed = 0
    for tokens, weight, chain in zip(job.tokens, job.weights, chains(job, plan), strict=True):
        assert mode == "multi-level" or len(chain) <= 1
        for above, prefix in zip([(), *chain], chain, strict=False):
            edges[prefix] = len(prefix) - len(above)
        computed += weight * (len(tokens) + 1 - (len(chain[-1]) if chain else 0))
    assert plan.computed == computed + sum(edges.values())
    assert len(edges) == len(plan.depth)
    assert all(edge >= least_tokens for edge in edges.values())


@given(jobs())
@settings(max_examples=100)
def test_the_optimum_computes_each_token_of_a_trie_once(job: Prompts) -> None:
    plan = planned(job, least_tokens=9)
    nodes = {tokens[:end] for tokens, weight in zip(job.tokens, job.weights, strict=True) if weight
             for end in range(1, len(tokens) + 1)}  # fmt: skip
    assert plan.optimum == len(nodes) + sum(job.weights)  # the last token of a prompt is always computed
    assert plan.logical == sum(w * (len(t) + 1) for t, w in zip(job.tokens, job.weights, strict=True))
    assert plan.optimum == planned(job).computed <= plan.computed <= plan.logical


@given(jobs(), MODES, st.integers(1, 6))
@settings(max_examples=100)
def test_units_are_dense_contiguous_and_of_at_most_so_many_sequences(job: Prompts, mode: str, most: int) -> None:
    plan, order = planned(job, mode, most=most), job.tree().order
    units = plan.unit[order].tolist()
    assert all(after - before in (0, 1) for before, after in zip([-1, *units], units, strict=False))
    assert plan.units == len(set(units)) and (plan.unit >= 0).tolist() == [weight > 0 for weight in job.weights]
    for unit in range(plan.units):
        members = np.flatnonzero(plan.unit == unit)
        assert len(members) == 1 or job.weight[members].sum() <= most


@given(jobs(), st.integers(1, 6))
@settings(max_examples=100)
def test_a_subtree_that_fits_is_in_one_unit_and_strangers_are_never_together(job: Prompts, most: int) -> None:
    plan = planned(job, most=most)
    paths = [plan.path(one) for one in range(len(job.tokens))]
    for node in range(len(plan.depth)):
        members = [one for one, path in enumerate(paths) if node in path]
        if sum(job.weights[one] for one in members) <= most:
            assert len({int(plan.unit[one]) for one in members}) == 1
    for unit in range(plan.units):
        first, *others = [paths[one] for one in np.flatnonzero(plan.unit == unit)]
        assert all(path[0] == first[0] for path in others)


def test_what_a_large_node_has_beside_its_subtrees_is_gathered_and_a_heavy_prompt_is_alone() -> None:
    head = (7, 7, 7)
    tokens = [(*head, 1, one) for one in range(3)] + [(*head, 2 + one) for one in range(4)] + [(9,), (8,)]
    job = Prompts(tokens, [1, 1, 1, 1, 1, 5, 1, 1, 1])
    assert planned(job).unit.tolist() == [0, 0, 0, 0, 1, 2, 3, 5, 4]


def test_what_hangs_on_different_nodes_is_not_gathered_and_a_large_subtree_parts_what_stands_around_it() -> None:
    inner = [(7, 5, leaf) for leaf in range(5)]
    job = Prompts([(7, 1), (7, 2), *inner, (7, 8), (7, 9)], [1] * 9)
    assert planned(job).unit.tolist() == [0, 0, 1, 1, 1, 1, 2, 3, 3]


def test_a_short_edge_is_folded_into_its_parent_but_short_ones_add_up() -> None:
    job = Prompts([(1, 1, 1), (1, 1, 1, 2), (1, 1, 1, 2, 3, 4), (1, 1, 1, 2, 3, 5)], [1] * 4)
    assert job.tree().depth.tolist() == [3, 4, 5]
    plan = planned(job, least_tokens=2)
    assert plan.depth.tolist() == [3, 5] and plan.parent.tolist() == [-1, 0] and plan.node.tolist() == [0, 0, 1, 1]


def test_a_mode_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UsageError, match="'all', expected multi-level or one-level"):
        planned(Prompts([(1,)], [1]), "all")
