"""A group's members together have every head and row once, and keep no cache twice that they need not."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from bgmpi.head_split import ROWS_TOGETHER, split_heads, split_rows, widths

MEMBERS = st.integers(1, 70)


def neighbours(spans, count: int) -> bool:
    """Say whether the spans lie one behind the other and cover 0 .. count - 1."""
    return all(last == first for (_, last), (first, _) in pairwise([(0, 0), *spans, (count, count)]))


@given(st.integers(1, 16), st.integers(1, 40), MEMBERS)
@example(4, 2, 3)
@example(1, 1, 2)
def test_query_heads_are_dealt_out_once_and_evenly(each: int, kv_heads: int, members: int) -> None:
    shares = split_heads(each * kv_heads, kv_heads, members)
    assert len(shares) == members
    assert neighbours([share.query for share in shares], each * kv_heads)
    if members <= kv_heads or members % kv_heads == 0:
        counts = widths(tuple(share.query for share in shares))
        assert max(counts) - min(counts) <= (each if members <= kv_heads else 1)


@given(st.integers(1, 16), st.integers(1, 40), MEMBERS)
def test_a_member_keeps_exactly_the_key_value_heads_that_its_queries_read(
    each: int, kv_heads: int, members: int
) -> None:
    for share in split_heads(each * kv_heads, kv_heads, members):
        (first, last), (kv_first, kv_last) = share.query, share.kv
        assert {head // each for head in range(first, last)} == set(range(kv_first, kv_last))
        assert (last - first) % max(1, kv_last - kv_first) == 0


@given(st.integers(1, 16), st.integers(1, 40), MEMBERS)
def test_key_value_heads_are_kept_twice_only_where_there_are_fewer_than_members(
    each: int, kv_heads: int, members: int
) -> None:
    shares = split_heads(each * kv_heads, kv_heads, members)
    kept = [kv for share in shares for kv in range(*share.kv)]
    if members <= kv_heads:
        assert kept == list(range(kv_heads))
    else:
        assert sorted(set(kept)) == list(range(kv_heads))
        assert max(share.kv[1] - share.kv[0] for share in shares) == 1


@given(st.integers(0, 5000), MEMBERS)
def test_rows_are_dealt_out_once_evenly_and_in_whole_tiles(rows: int, members: int) -> None:
    spans = split_rows(rows, members)
    assert len(spans) == members and neighbours(spans, rows)
    assert all(first % ROWS_TOGETHER == 0 or first == rows for first, _ in spans)
    assert max(widths(spans)) - min(widths(spans)) < 2 * ROWS_TOGETHER
    assert sum(widths(spans, 3)) == 3 * rows
