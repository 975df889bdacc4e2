"""Laws of the page pool: nothing leaks, nothing is held twice, all or nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bgmpi.paged_kv import PagedKV, PageError


def slots(*names: int) -> np.ndarray:
    return np.array(names, np.int64)


def test_open_holds_the_prompt_and_reserves_two_pages() -> None:
    kv = PagedKV(pages=10, slots=2, page_tokens=4)
    assert kv.open(0, tokens=9, most_tokens=40)
    assert (kv.free, int(kv.held[0]), int(kv.reserved[0])) == (5, 3, 2)
    kv.check()


def test_open_reserves_no_page_that_the_sequence_can_never_fill() -> None:
    kv = PagedKV(pages=10, slots=2, page_tokens=4)
    assert kv.open(0, tokens=9, most_tokens=12)
    assert (kv.free, int(kv.reserved[0])) == (7, 0)


def test_open_that_does_not_fit_changes_nothing() -> None:
    kv = PagedKV(pages=4, slots=2, page_tokens=4)
    assert not kv.open(0, tokens=9, most_tokens=40)
    assert kv.free == 4
    assert kv.open(0, tokens=5, most_tokens=40)
    kv.check()


def test_extend_spends_reserves_and_names_who_lacks() -> None:
    kv = PagedKV(pages=7, slots=2, page_tokens=4)
    assert kv.open(0, tokens=4, most_tokens=100)
    assert kv.open(1, tokens=4, most_tokens=100)
    lacking = kv.extend(slots(0, 1), slots(5, 5))
    assert lacking.tolist() == [1]
    assert kv.reserved.tolist() == [2, 1]
    kv.check()


def test_extend_without_a_reserved_page_is_refused_loudly() -> None:
    kv = PagedKV(pages=2, slots=1, page_tokens=4)
    assert kv.open(0, tokens=4, most_tokens=8)
    with pytest.raises(PageError, match="needs 2 pages and has 1 reserved"):
        kv.extend(slots(0), slots(12))


def test_a_doctored_pool_is_found_out() -> None:
    kv = PagedKV(pages=8, slots=2, page_tokens=4)
    assert kv.open(0, tokens=8, most_tokens=8)
    assert kv.open(1, tokens=8, most_tokens=8)
    kv.table[1, 0] = kv.table[0, 0]
    with pytest.raises(PageError, match="two holders"):
        kv.check()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30), st.integers(0, 30)), max_size=60), st.integers(1, 20))
@settings(deadline=None, max_examples=200)
def test_pages_are_conserved_under_any_order_of_calls(calls: list[tuple[int, int, int]], pages: int) -> None:
    kv = PagedKV(pages, slots=4, page_tokens=3)
    tokens = [0] * 4
    for slot, size, more in calls:
        if not tokens[slot]:
            if kv.open(slot, size, size + more, spare=more % 3):
                tokens[slot] = size
        elif more % 4 == 0:
            kv.close(slots(slot))
            tokens[slot] = 0
        else:
            room = int(kv.held[slot] + kv.reserved[slot]) * 3
            grown = min(tokens[slot] + size % 4, room, int(kv.limit[slot]) * 3)
            kv.extend(slots(slot), slots(grown))
            tokens[slot] = grown
            assert kv.held[slot] * 3 >= grown
        kv.check()
    kv.close(np.flatnonzero(np.array(tokens)))
    assert kv.free == pages
