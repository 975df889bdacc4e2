"""Laws of the simulated LRU page cache that our plan is compared with."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from lru_prefix import ONCE, Ask, PageCache, lru_prefill


def asks(*prompts: list[int], answer: int = 1) -> list[Ask]:
    return [Ask(np.array(prompt, np.int32), answer) for prompt in prompts]


def computed(jobs: list[Ask], pages: int, running: int = 1) -> int:
    return lru_prefill(jobs, pages=pages, page_tokens=2, running=running)


def test_a_prompt_seen_before_costs_what_is_behind_its_last_full_page() -> None:
    assert computed(asks([1, 2, 3, 4, 5], [1, 2, 3, 4, 6]), 10) == 5 + 1


def test_the_last_token_of_a_prompt_is_always_computed_with_its_page() -> None:
    assert computed(asks([1, 2, 3, 4], [1, 2, 3, 4]), 10) == 4 + 2


def test_a_page_is_known_by_what_stands_before_it_too() -> None:
    assert computed(asks([1, 2, 7, 7, 0], [3, 4, 7, 7, 0]), 10) == 5 + 5


def test_who_begins_in_the_same_step_finds_the_pages() -> None:
    assert computed(asks([1, 2, 3, 4, 5], [1, 2, 3, 4, 6]), 10, running=2) == 5 + 1


def test_what_was_used_longest_ago_goes_first() -> None:
    one, two, three = [1, 1, 0], [2, 2, 0], [3, 3, 0]  # two pages each, with the answer
    assert computed(asks(one, two, three, one), 6) == 3 + 3 + 3 + 1
    assert computed(asks(one, two, three, one), 5) == 3 + 3 + 3 + 1
    assert computed(asks(one, two, three, one), 4) == 3 + 3 + 3 + 3
    assert computed(asks(one, two, one, three, one), 5) == 3 + 3 + 1 + 3 + 1


def test_the_end_of_a_prompt_goes_before_its_begin() -> None:
    long, other = [1, 1, 2, 2, 3, 3, 0], [9] * 5
    assert computed(asks(long, other, long), 5) == 7 + 5 + 3


def test_pages_of_a_running_sequence_are_not_taken() -> None:
    # Five pages: the long answer holds four, its shared page among them, so the others pass through one by one.
    jobs = [*asks([1, 1, 0], answer=5), *asks([5], [6], [7]), *asks([1, 1, 4])]
    assert computed(jobs, 5, running=2) == 3 + 1 + 1 + 1 + 1


def test_groups_in_turn_that_do_not_fit_save_nothing_and_side_by_side_all() -> None:
    groups = [[[group] * 8 + [member] for member in range(4)] for group in range(6)]
    in_turn = [groups[group][member] for member in range(4) for group in range(6)]
    together = [prompt for group in groups for prompt in group]
    assert computed(asks(*in_turn), 12) == 24 * 9
    assert computed(asks(*together), 12) == 6 * 8 + 24


def test_a_sequence_that_the_cache_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="sequence 0 needs 3 pages of 2"):
        computed(asks([1, 2, 3, 4]), 2)


@given(st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=8), st.integers(1, 5)), max_size=20),
       st.integers(7, 20), st.integers(1, 4))  # fmt: skip
@settings(max_examples=100)
def test_every_prompt_computes_its_last_token_and_at_most_all(
    jobs: list[tuple[list[int], int]], pages: int, running: int
) -> None:
    sequences = [Ask(np.array(prompt, np.int32), answer) for prompt, answer in jobs]
    assert len(jobs) <= computed(sequences, pages, running) <= sum(len(prompt) for prompt, _ in jobs)


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True), max_size=20), st.integers(6, 12))
@settings(max_examples=100)
def test_free_and_held_pages_are_all_pages(chains: list[list[int]], pages: int) -> None:
    cache, held = PageCache(pages), []
    for chain in chains:
        taken = cache.take(chain, cache.hits(chain), 1)
        if taken is None:
            cache.let_go(held.pop(0))
        else:
            held.append(taken)
        alone = sum(page == ONCE for one in held for page in one)
        assert len(cache.free) + len(cache.holders) + alone == pages
        assert not cache.free.keys() & cache.holders.keys()
