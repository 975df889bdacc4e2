"""Laws of evening out: only what is worth it, never more than the target can take, never beyond the mean."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bgmpi.balance import Evening, Movable, even_out
from bgmpi.primitives import Migrate

RULES = Evening(page_bytes=1000)
PLENTY = np.full(8, 1000)


def movable(owner: list[int], kind: list[int], remaining: list[float], pages: list[int] | None = None) -> Movable:
    names = np.arange(len(owner))
    need = np.array(pages or [2] * len(owner))
    return Movable(names, np.array(owner), np.array(kind), np.array(remaining, float), need)


def decided(have: Movable, ranks: int, *, slots: np.ndarray = PLENTY, pages: np.ndarray = PLENTY,
            seconds: float = 0.1, rules: Evening = RULES) -> list[Migrate]:
    work = np.bincount(have.owner, weights=have.remaining, minlength=ranks)
    return even_out(have, work, slots[:ranks], pages[:ranks], seconds, rules)


def told(moves: list[Migrate]) -> list[tuple[int, int, list[int]]]:
    return [(move.source, move.target, sorted(move.sequences.tolist())) for move in moves]


def test_many_sequences_move_in_one_order() -> None:
    assert [(s, t, len(n)) for s, t, n in told(decided(movable([0] * 8, [0] * 8, [10] * 8), 2))] == [(0, 1, 4)]


def test_waiting_ones_move_before_yielded_ones_before_active_ones() -> None:
    have = movable([0] * 6, [2, 1, 0, 2, 1, 0], [10] * 6)
    assert told(decided(have, 2)) == [(0, 1, [1, 2, 5])]


def test_of_those_with_pages_the_ones_with_most_work_a_page_move() -> None:
    assert told(decided(movable([0] * 4, [2] * 4, [10] * 4, [9, 1, 9, 1]), 2)) == [(0, 1, [1, 3])]


def test_a_small_gap_stays() -> None:
    assert not decided(movable([0] * 11 + [1] * 9, [0] * 20, [10] * 20), 2)


def test_a_gap_that_saves_no_time_worth_speaking_of_stays() -> None:
    assert not decided(movable([0] * 4, [0] * 4, [10] * 4), 2, seconds=0.001)


def test_the_only_sequence_of_a_rank_stays() -> None:
    assert not decided(movable([0], [2], [1000.0]), 4)


def test_a_copy_that_costs_more_than_it_saves_is_not_made_but_within_a_node_it_is_free() -> None:
    have = movable([0] * 4, [2] * 4, [10] * 4)
    assert not decided(have, 2, rules=Evening(page_bytes=10**9, rate=1e9))
    assert decided(have, 2, rules=Evening(page_bytes=10**9, rate=1e9, nodes=(0, 0)))
    assert decided(movable([0] * 4, [0] * 4, [10] * 4), 2, rules=Evening(page_bytes=10**9, rate=1e9))


def test_a_rank_of_the_same_node_is_preferred() -> None:
    rules = Evening(page_bytes=1, nodes=(0, 1, 0, 1))
    moves = decided(movable([0] * 8 + [1] * 4 + [3] * 4, [0] * 16, [10] * 16), 4, rules=rules)
    assert told(moves)[0][:2] == (0, 2)


@pytest.mark.parametrize(("slots", "pages", "most"), [(1, 1000, 1), (1000, 4, 2), (0, 1000, 0), (1000, 1, 0)])
def test_a_target_never_gets_more_than_it_can_take(slots: int, pages: int, most: int) -> None:
    have = movable([0] * 8, [0] * 8, [10] * 8)
    moves = decided(have, 2, slots=np.array([9, slots]), pages=np.array([9, pages]))
    assert sum(len(move.sequences) for move in moves) == most


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2), st.integers(1, 500), st.integers(1, 9)), max_size=60),
    st.lists(st.integers(0, 20), min_size=5, max_size=5), st.lists(st.integers(0, 60), min_size=5, max_size=5),
)
@settings(deadline=None, max_examples=100)
def test_moves_even_out_keep_bounds_and_come_to_rest(
    rows: list[tuple[int, int, int, int]], slots: list[int], pages: list[int]
) -> None:
    have = movable([r[0] for r in rows], [r[1] for r in rows], [r[2] for r in rows], [r[3] for r in rows])
    left, room, owner = np.array(slots), np.array(pages), have.owner.astype(np.int64)
    for _ in range(100):
        now = Movable(have.sequences, owner, have.kind, have.remaining, have.pages)
        work = np.bincount(owner, weights=have.remaining, minlength=5)
        moves = even_out(now, work, left, room, 0.1, RULES)
        if not moves:
            return
        owner = owner.copy()
        for move in moves:
            assert (owner[move.sequences] == move.source).all()
            owner[move.sequences] = move.target
            left[move.target] -= len(move.sequences)
            room[move.target] -= have.pages[move.sequences].sum()
        assert (left >= 0).all() and (room >= 0).all()
        after = np.bincount(owner, weights=have.remaining, minlength=5)
        assert (after**2).sum() < (work**2).sum() and after.max() < work.max() and after.min() >= work.min()
    raise AssertionError("it never comes to rest")
