"""Laws of the prefix tree: its nodes are the prefixes that a trie of all prompts has in common, to the token."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from prompts_for_tests import Prompts, jobs

from bgmpi.errors import InternalError
from bgmpi.prefix_tree import PrefixTree


def prefixes(job: Prompts, tree: PrefixTree) -> list[tuple[int, ...]]:
    """Return the tokens of each node, taken from its first member."""
    return [job.tokens[tree.order[begin]][:depth] for begin, depth in zip(tree.begin, tree.depth, strict=True)]


@given(jobs())
@settings(max_examples=100)
def test_the_nodes_are_the_prefixes_that_two_or_more_sequences_share(job: Prompts) -> None:
    tree, shared = job.tree(), job.shared()
    found = prefixes(job, tree)
    assert len(set(found)) == len(found)
    assert dict(zip(found, tree.members.tolist(), strict=True)) == shared


@given(jobs())
@settings(max_examples=100)
def test_parent_and_node_are_the_longest_shared_prefixes_above(job: Prompts) -> None:
    tree = job.tree()
    found = prefixes(job, tree)
    number = {prefix: node for node, prefix in enumerate(found)}

    def longest(tokens: tuple[int, ...], most: int) -> int:
        return next((number[tokens[:end]] for end in range(most, 0, -1) if tokens[:end] in number), -1)

    assert tree.parent.tolist() == [longest(prefix, len(prefix) - 1) for prefix in found]
    assert (tree.parent < np.arange(len(found))).all()
    for prompt, (tokens, weight) in enumerate(zip(job.tokens, job.weights, strict=True)):
        assert tree.node[prompt] == (longest(tokens, len(tokens)) if weight else -1)


@given(jobs())
@settings(max_examples=100)
def test_the_order_is_that_of_the_tokens_and_a_nodes_members_stand_together(job: Prompts) -> None:
    tree = job.tree()
    order = tree.order.tolist()
    assert sorted(order) == [prompt for prompt, weight in enumerate(job.weights) if weight]
    assert [job.tokens[one] for one in order] == sorted(job.tokens[one] for one in order)
    for prefix, begin, end in zip(prefixes(job, tree), tree.begin, tree.end, strict=True):
        begins_so = [job.tokens[one][: len(prefix)] == prefix for one in order]
        assert begins_so == [begin <= place < end for place in range(len(order))]


@given(jobs())
@settings(max_examples=50)
def test_the_tree_does_not_depend_on_the_order_in_which_prompts_are_added(job: Prompts) -> None:
    order = list(range(len(job.tokens)))
    random.Random(1).shuffle(order)
    one, other = job.tree(), job.builder(order, at_once=5).build(job.weight, job.read)
    assert one.depth.tolist() == other.depth.tolist() and one.node.tolist() == other.node.tolist()


def test_samples_of_one_prompt_share_all_of_it() -> None:
    tree = Prompts([(1, 2, 3, 4, 5)], [8]).tree()
    assert (tree.depth.tolist(), tree.members.tolist(), tree.node.tolist()) == ([5], [8], [0])


def test_a_prompt_without_sequences_is_in_no_node_and_not_in_the_order() -> None:
    tree = Prompts([(1, 2), (1, 3), (1, 2)], [1, 0, 1]).tree()
    assert (tree.depth.tolist(), tree.node.tolist(), tree.order.tolist()) == ([2], [0, -1, 0], [0, 2])


def test_a_prompt_that_was_never_added_shares_nothing() -> None:
    job = Prompts([(1, 2), (1, 3), (1, 2)], [1, 2, 1])
    assert job.builder([0, 1]).build(job.weight, job.read).node.tolist() == [0, 1, -1]


@pytest.mark.parametrize("prompts", [[], [()], [(), ()]])
def test_nothing_shared_is_an_empty_tree(prompts: list[tuple[int, ...]]) -> None:
    tree = Prompts(prompts, [1] * len(prompts)).tree()
    assert len(tree.depth) == 0 and tree.node.tolist() == [-1] * len(prompts) and len(tree.order) == len(prompts)


def test_life_is_shown_while_it_is_built() -> None:
    beats: list[int] = []
    job = Prompts([(1, 2), (1, 3)], [1, 1])
    job.builder().build(job.weight, job.read, lambda: beats.append(1))
    assert beats


def test_a_reader_of_other_tokens_than_were_added_is_refused() -> None:
    job = Prompts([(1, 2, 3), (1, 2, 4)], [1, 1])
    with pytest.raises(InternalError, match="hashed unlike but is read alike"):
        job.builder().build(job.weight, lambda prompts, _: np.zeros((len(prompts), 3), np.int32))


def test_a_prompt_added_twice_and_lengths_that_do_not_add_up_are_refused() -> None:
    builder = Prompts([(1, 2), (1, 3)], [1, 1]).builder()
    one = np.array([0])
    with pytest.raises(InternalError, match="added before"):
        builder.add(one, np.array([2]), np.array([1, 2], np.int32))
    with pytest.raises(InternalError, match="1 prompts of 3 tokens, got 2"):
        builder.add(one, np.array([3]), np.array([1, 2], np.int32))
