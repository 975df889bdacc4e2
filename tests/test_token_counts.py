"""What is computed is counted once, what is computed again also as wasted."""

from __future__ import annotations

import numpy as np

from bgmpi.token_counts import TokenCounts


def step(counts: TokenCounts, before: list[int], count: list[int], drawn: int = 0) -> None:
    names = np.arange(len(before))
    counts.step(names, np.full(len(before), 10), np.array(before, np.int32), np.array(count, np.int32), drawn)


def told(counts: TokenCounts) -> tuple[int, int, int, int]:
    return counts.prompt, counts.generated, counts.wasted, counts.reused


def test_tokens_behind_the_prompt_are_none_of_it() -> None:
    counts = TokenCounts()
    step(counts, [0, 8, 12], [4, 5, 1], drawn=2)
    assert told(counts) == (4 + 2, 2, 0, 0)


def test_what_was_lost_is_wasted_as_far_as_it_comes_again() -> None:
    counts = TokenCounts()
    counts.lose(0, 7)
    step(counts, [0, 0], [5, 5])
    step(counts, [5, 5], [5, 5])
    step(counts, [0], [3])
    assert told(counts) == (10 + 10 + 3, 0, 7, 0)


def test_a_prefix_is_reused_by_who_had_not_computed_it_before() -> None:
    counts = TokenCounts()
    counts.reuse(0, 6)
    counts.lose(0, 9)
    counts.reuse(0, 6)
    step(counts, [6], [4])
    assert told(counts) == (4, 0, 3, 6)


def test_taking_begins_anew_and_forgets_no_loss_but_of_who_left() -> None:
    counts = TokenCounts()
    counts.lose(0, 4)
    counts.lose(1, 4)
    counts.forget(1)
    step(counts, [0], [2], drawn=1)
    assert told(counts.take()) == (2, 1, 2, 0) and told(counts) == (0, 0, 0, 0)
    step(counts, [2, 0], [2, 4])
    assert counts.wasted == 2
