"""Laws of sorting prompts by page hashes: few pages are read, in pieces, and a collision does no harm."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from prompts_for_tests import Prompts, jobs

from bgmpi import prefix_order
from bgmpi.page_hashes import PageHashes
from bgmpi.prefix_tree import PrefixTree


def test_segments_split_in_batches_give_the_same_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(2)
    job = Prompts([tuple(draw.choices(range(2), k=draw.randrange(12))) for _ in range(300)], [1] * 300)
    whole = job.tree()
    monkeypatch.setattr(prefix_order, "BATCH_PROMPTS", 4)
    monkeypatch.setattr(prefix_order, "READ_PAGES", 3)
    parts = job.tree()
    for name in PrefixTree.__slots__:
        np.testing.assert_array_equal(getattr(whole, name), getattr(parts, name))


def test_at_most_two_pages_a_prompt_are_read() -> None:
    draw = random.Random(3)
    heads = [tuple(draw.choices(range(9), k=40)) for _ in range(10)]
    job = Prompts([head + tuple(draw.choices(range(9), k=20)) for head in heads for _ in range(10)], [1] * 100)
    pages = 0

    def read(prompts: np.ndarray, ordinal: int) -> np.ndarray:
        nonlocal pages
        pages += len(prompts)
        return job.read(prompts, ordinal)

    job.builder().build(job.weight, read)
    assert 100 <= pages <= 200


@given(jobs())
@example(Prompts([(0, 0, 0, 1, 1, 0), (0, 0, 0, 1, 1, 2, 0), (0, 0, 0, 2)], [1, 1, 1]))
@settings(max_examples=100)
def test_where_many_hashes_collide_no_prefix_is_longer_than_its_prompts(job: Prompts) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            PageHashes, "_hash", lambda _, begins, sizes, tokens: tokens[begins + sizes - 1].astype(np.uint64) + 1
        )
        tree = job.tree()
    assert sorted(tree.order.tolist()) == [prompt for prompt, weight in enumerate(job.weights) if weight]
    for depth, begin, end in zip(tree.depth, tree.begin, tree.end, strict=True):
        assert all(len(job.tokens[prompt]) >= depth for prompt in tree.order[begin:end])
