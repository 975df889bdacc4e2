"""Laws of placing: even, in order of arrival, never more than there is room for."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bgmpi.placement import Room, place

ONE = np.ones(10_000, np.int64)


def room(work: list[float], slots: list[int], pages: list[int]) -> Room:
    return Room(np.array(work, float), np.array(slots), np.array(pages), np.zeros(len(work), bool))


def test_the_emptiest_rank_gets_the_first_ones_until_all_are_level() -> None:
    ranks = place(np.full(6, 10.0), np.full(6, 1), ONE[:6], room([40.0, 0.0, 20.0], [9] * 3, [99] * 3))
    np.testing.assert_array_equal(np.bincount(ranks, minlength=3) * 10 + [40, 0, 20], [40, 40, 40])
    assert ranks[0] == 1


def test_what_one_rank_has_no_room_for_goes_to_the_others() -> None:
    ranks = place(np.full(9, 10.0), np.full(9, 1), ONE[:9], room([0.0] * 3, [9, 1, 9], [99, 99, 3]))
    np.testing.assert_array_equal(np.bincount(ranks, minlength=3), [5, 1, 3])


def test_a_long_sequence_that_fits_nowhere_is_not_overtaken() -> None:
    need = np.array([1, 1, 50, 1, 1])
    assert len(place(np.full(5, 1.0), need, ONE[:5], room([0.0] * 2, [9] * 2, [40] * 2))) == 2


def test_a_rank_that_has_nothing_takes_one_of_any_size() -> None:
    empty = room([0.0, 0.0], [9, 9], [4, 4])
    empty.idle[:] = True
    assert sorted(place(np.full(3, 1.0), np.full(3, 50), ONE[:3], empty).tolist()) == [0, 1]


def test_a_unit_goes_to_one_rank_whole() -> None:
    free = room([0.0, 0.0], [3, 3], [99, 99])
    ranks = place(np.array([16.0, 16.0, 1.0]), np.array([20, 20, 1]), np.array([16, 16, 1]), free)
    assert sorted(ranks.tolist()) == [0, 1], "the third waits: nobody has a slot left"
    assert free.slots.tolist() == [-13, -13]


def test_an_input_sorted_by_length_still_makes_even_ranks() -> None:
    effort = np.sort(np.random.default_rng(1).lognormal(5, 1, 10_000))
    free = room([0.0] * 4, [10_000] * 4, [10**9] * 4)
    ranks = place(effort, np.ones(10_000, np.int64), ONE, free)
    work = np.bincount(ranks, weights=effort)
    assert work.max() - work.min() <= 2 * effort.max()
    np.testing.assert_allclose(work, free.work)


@given(
    st.lists(st.tuples(st.integers(1, 2000), st.integers(1, 30), st.integers(1, 9)), max_size=120),
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 40), st.integers(-5, 200)), min_size=1, max_size=6),
)
@settings(deadline=None, max_examples=80)
def test_a_prefix_is_placed_within_all_bounds(
    jobs: list[tuple[int, int, int]], ranks: list[tuple[int, int, int]]
) -> None:
    """But for the slots that the last unit of a rank takes beyond the first."""
    effort, need = np.array([j[0] for j in jobs], float), np.array([j[1] for j in jobs], np.int64)
    size = np.array([j[2] for j in jobs], np.int64)
    work, slots, pages = (np.array(column) for column in zip(*ranks, strict=True))
    free = Room(work.astype(float), slots.copy(), pages.copy(), np.zeros(len(ranks), bool))
    got = place(effort, need, size, free)
    count = np.bincount(got, weights=size[: len(got)], minlength=len(ranks)).astype(np.int64)
    last = np.zeros(len(ranks), np.int64)
    last[got] = size[: len(got)]
    taken = np.bincount(got, weights=need[: len(got)], minlength=len(ranks))
    assert (count - last < np.maximum(slots, 1)).all() and (count[slots <= 0] == 0).all()
    assert (taken[count > 0] <= pages[count > 0]).all()
    np.testing.assert_array_equal(free.slots, slots - count)
    np.testing.assert_array_equal(free.pages, pages - taken)
    np.testing.assert_allclose(free.work, work + np.bincount(got, weights=effort[: len(got)], minlength=len(ranks)))
    if len(got) < len(jobs):
        assert not ((free.slots > 0) & (free.pages >= need[len(got)])).any()
