"""Who shares leading pages with whom: every stretch is true, none is left out, none goes too far."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bgmpi.kernels.shared_pages import LEAST_TOKENS, Stretch, find_stretches

#: So that no stretch is too short.
PAGE = LEAST_TOKENS


def table(*rows: list[int]) -> np.ndarray:
    widest = max(map(len, rows), default=0) + 1
    return np.array([row + [-1] * (widest - len(row)) for row in rows], np.int32).reshape(len(rows), widest)


def found(rows: list[list[int]], shareable: list[int] | None = None, page_tokens: int = PAGE) -> list[tuple]:
    able = np.array([len(row) for row in rows] if shareable is None else shareable, np.int64)
    stretches = find_stretches(table(*rows), able, page_tokens)
    return sorted((one.begin // page_tokens, one.end // page_tokens, one.members.tolist()) for one in stretches)


def test_members_need_not_be_neighbours() -> None:
    assert found([[4, 7, 1], [5, 6], [4, 7, 2], [5, 8], [4, 7]]) == [(0, 1, [1, 3]), (0, 2, [0, 2, 4])]


def test_three_levels_are_three_stretches_one_behind_the_other() -> None:
    rows = [[0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 5], [0, 1, 5, 6], [0, 9], [8]]
    assert found(rows) == [(0, 1, [0, 1, 2, 3, 4]), (1, 2, [0, 1, 2, 3]), (2, 3, [0, 1]), (2, 3, [2, 3])]


def test_pages_are_shared_only_before_the_new_tokens_of_every_member() -> None:
    assert found([[3, 4, 5], [3, 4, 5], [3, 4, 5]], [3, 2, 0]) == [(0, 2, [0, 1])]
    assert found([[3, 4, 5], [3, 4, 5]], [3, 0]) == []


def test_equal_numbers_behind_different_ones_are_not_shared() -> None:
    assert found([[1, 5, 6], [2, 5, 6]]) == []


def test_nothing_shared_finds_nothing() -> None:
    assert found([]) == []
    assert found([[1, 2]]) == []
    assert found([[1, 2], [3, 4], [5]]) == []


def test_a_stretch_too_short_to_pay_is_left_to_those_within() -> None:
    each = LEAST_TOKENS // 4
    rows = [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 6, 7, 8], [0, 9]]
    assert found(rows, page_tokens=each) == [(0, 5, [0, 1])]
    assert found([[0, 1, 2], [0, 1, 2]], page_tokens=each) == []


def common(a: list[int], b: list[int]) -> int:
    return next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(st.data())
def test_every_sequence_is_covered_as_far_as_it_shares_with_anybody(data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 12))
    rows: list[list[int]] = []
    fresh = iter(range(1000))
    for _ in range(count):  # a copy of some pages of another, then own ones
        begin = data.draw(st.sampled_from(rows)) if rows and data.draw(st.booleans()) else []
        rows.append(begin[: data.draw(st.integers(0, 6))] + [next(fresh) for _ in range(data.draw(st.integers(0, 4)))])
    able = [data.draw(st.integers(0, len(row))) for row in rows]
    stretches = find_stretches(table(*rows), np.array(able, np.int64), PAGE)
    for s, row in enumerate(rows):
        mine = [one for one in stretches if s in one.members]
        assert [one.begin for one in mine] == [0, *(one.end for one in mine[:-1])][: len(mine)]
        others = [common(row[: able[s]], rows[o][: able[o]]) for o in range(count) if o != s]
        assert (mine[-1].end // PAGE if mine else 0) == max(others, default=0)
    for one in stretches:
        check_members(one, rows, able)


def check_members(one: Stretch, rows: list[list[int]], able: list[int]) -> None:
    """Raise AssertionError unless the members, and only they, have the same pages up to the stretch's end."""
    end = one.end // PAGE
    lead = rows[one.members[0]][:end]
    assert one.begin < one.end
    assert one.members.tolist() == [s for s, row in enumerate(rows) if able[s] >= end and row[:end] == lead]


@pytest.mark.parametrize("page", [0, 255, 256, 2**31 - 1])
def test_any_page_number_may_be_shared(page: int) -> None:
    assert found([[page, 1, 0], [7, 2], [page, 1, 0], [page, 3]]) == [(0, 1, [0, 2, 3]), (1, 3, [0, 2])]
