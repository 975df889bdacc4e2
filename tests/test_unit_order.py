"""Units are read whole where they may, the worthiest first, and no row waits longer than the bound of ageing allows."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bgmpi.fairness import Wishes, latest_turns
from bgmpi.unit_order import UnitOrder, larger_prefixes

NEVER = float("inf")
ROOT = np.array([-1], np.int32)
FLAT = np.full(9, -1, np.int32)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, Wishes]:
    """Draw units of rows (-1: alone), how many answer tokens each row should have, and what rows ask."""
    count = draw(st.integers(0, 60))
    unit = draw(st.lists(st.integers(-1, draw(st.integers(0, 12))), min_size=count, max_size=count))
    decode = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    priority = draw(st.none() | st.lists(st.integers(-2, 1), min_size=count, max_size=count))
    deadline = draw(st.none() | st.lists(st.sampled_from([NEVER, NEVER, 1.0, 2.0]), min_size=count, max_size=count))
    wishes = Wishes(
        None if priority is None else np.array(priority, np.int32),
        None if deadline is None else np.array(deadline, np.float32), draw(st.integers(0, 20)),
    )  # fmt: skip
    return np.array(unit, np.int32), np.array(decode, np.float64), wishes


def order_of(unit: np.ndarray, decode: np.ndarray, wishes: Wishes, rows: np.ndarray | None = None) -> UnitOrder:
    rows = np.arange(len(unit)) if rows is None else rows
    order = UnitOrder(rows, unit, np.zeros(len(unit), np.int32), ROOT, np.ones(len(unit), np.int64), wishes)
    order.sort(decode)
    return order


def turns(order: UnitOrder) -> list[tuple[list[int], int]]:
    found = []
    while order.left:
        found.append(order.next())
    return found


@given(jobs(), st.data())
def test_each_row_is_read_once_and_in_time_however_often_the_order_is_made_anew(
    job: tuple[np.ndarray, np.ndarray, Wishes], data: st.DataObject
) -> None:
    unit, decode, wishes = job
    count = len(unit)
    order = order_of(unit, decode, wishes)
    read: list[int] = []
    while order.left:
        if data.draw(st.booleans()):
            order.sort(data.draw(st.permutations(decode.tolist()).map(np.array)))
        read += order.next()[0]
    assert sorted(read) == list(range(count)) and order.left == 0
    turn = np.argsort(read)
    assert (turn <= latest_turns(count, wishes.ageing)).all()
    for row in range(count):
        assert (np.array(read[: turn[row]]) > row).sum() <= wishes.ageing * (row + 1)


@given(jobs())
def test_the_level_is_the_most_urgent_that_is_left_and_never_falls(job: tuple[np.ndarray, np.ndarray, Wishes]) -> None:
    unit, decode, wishes = job
    found = turns(order_of(unit, decode, wishes))
    asked = wishes.priority if wishes.priority is not None else np.zeros(len(unit), np.int32)
    dense = np.unique(asked, return_inverse=True)[1]
    left = set(range(len(unit)))
    for rows, level in found:
        assert level == min(dense[row] for row in left)
        left -= set(rows)


@given(jobs())
def test_rows_that_are_read_together_are_of_one_unit_and_ask_the_same(
    job: tuple[np.ndarray, np.ndarray, Wishes]
) -> None:
    unit, decode, wishes = job
    for rows, _ in turns(order_of(unit, decode, wishes)):
        assert len({(int(unit[row]), row if unit[row] < 0 else 0) for row in rows}) == 1
        for column in (wishes.priority, wishes.deadline):
            assert column is None or len({float(column[row]) for row in rows}) == 1


@given(jobs())
def test_units_no_longer_than_ageing_are_never_parted_where_all_are_of_one_class(
    job: tuple[np.ndarray, np.ndarray, Wishes]
) -> None:
    unit, decode, wishes = job
    sizes = np.bincount(unit[unit >= 0]) if (unit >= 0).any() else np.zeros(1, np.int64)
    found = turns(order_of(unit, decode, Wishes(ageing=max(wishes.ageing, int(sizes.max()) - 1))))
    named = [int(unit[rows[0]]) for rows, _ in found if unit[rows[0]] >= 0]
    assert len(named) == len(set(named)), "read in parts"


def test_the_worthiest_goes_first_and_its_rows_in_their_place() -> None:
    unit, node = np.array([0, 1, 0, -1, 1, 0], np.int32), np.array([2, 3, 0, -1, 4, 1], np.int32)
    order = UnitOrder(np.array([3, 4, 5, 7, 8, 9]), unit, node, FLAT, np.array([9, 9, 1, 5, 1, 2]), Wishes(ageing=99))
    order.sort(np.array([1.0, 5, 1, 1, 5, 1]))  # worth 3/12, 10/10, 1/5
    assert turns(order) == [([4, 8], 0), ([5, 9, 3], 0), ([7], 0)]
    order = UnitOrder(np.array([3, 4, 5, 7, 8, 9]), unit, node, FLAT, np.array([9, 9, 1, 5, 1, 2]), Wishes(ageing=99))
    order.sort(np.array([1.0, 5, 1, 1, 5, 1]))
    assert order.next()[0] == [4, 8]
    order.sort(np.array([1.0, 5, 1, 9, 5, 1]))
    assert turns(order) == [([7], 0), ([5, 9, 3], 0)]


def test_who_computes_nothing_goes_first_and_ties_go_as_they_stand() -> None:
    alone, prefill = np.full(4, -1, np.int32), np.array([2, 2, 0, 1])
    order = UnitOrder(np.arange(4), alone, alone, ROOT, prefill, Wishes(ageing=9))
    order.sort(np.array([2.0, 2, 0, 1]))
    assert [rows for rows, _ in turns(order)] == [[2], [0], [1], [3]]


def test_the_oldest_is_paid_alone_for_who_is_more_urgent_and_with_its_unit_among_its_like() -> None:
    # Rows 0 to 5 are three scattered pairs of the bulk, 6 to 11 are urgent and stand alone.
    unit = np.array([0, 1, 2, 0, 1, 2, *[-1] * 6], np.int32)
    urgent = np.array([1] * 6 + [0] * 6, np.int32)
    found = turns(order_of(unit, np.zeros(12), Wishes(urgent, None, 2)))
    assert [rows for rows, _ in found] == [[6], [7], [0], [8], [9], [1], [10], [11], [2, 5], [3], [4]]
    worth = np.array([1.0, 2, 3, 1, 2, 3])
    assert [rows for rows, _ in turns(order_of(unit[:6], worth, Wishes(ageing=1)))] == [[0, 3], [1, 4], [2, 5]]
    assert [rows for rows, _ in turns(order_of(unit[:6], worth, Wishes(ageing=3)))] == [[2, 5], [0, 3], [1, 4]]


def test_ageing_0_is_the_order_of_the_input() -> None:
    unit = np.array([0, 1, 0, 0, 1, 2, 2], np.int32)
    found = turns(order_of(unit, np.arange(7.0), Wishes(np.arange(7, 0, -1, np.int32), None, 0)))
    assert [row for rows, _ in found for row in rows] == list(range(7))
    assert [rows for rows, _ in turns(order_of(unit, np.arange(7.0), Wishes()))] == [[0], [1], [2, 3], [4], [5, 6]]


def test_a_unit_is_parted_between_prefixes_where_that_can_be() -> None:
    # Two documents of 4 sections of 16 rows each, a unit a document, scattered over the input like dealt cards; within
    # a section some rows share a little more.
    rows = np.arange(128)
    parent = np.array([-1, *[0, 1] * 4, -1, *[9, 10] * 4], np.int32)
    parent[1::2], parent[9] = 0, -1
    parent[[2, 4, 6, 8]] = [1, 3, 5, 7]
    parent[[10, 12, 14, 16]], parent[[11, 13, 15, 17]] = 9, [10, 12, 14, 16]
    document, section = rows % 2, rows // 2 % 4
    node = (9 * document + 1 + 2 * section + (rows % 5 == 0)).astype(np.int32)
    order = UnitOrder(rows, document.astype(np.int32), node, parent, np.ones(128, np.int64), Wishes(ageing=15))
    order.sort(np.zeros(128))
    found = [rows for rows, _ in turns(order)]
    assert len(found) == 8 and all(len(set(section[rows].tolist())) == 1 for rows in found)


def test_large_scattered_units_come_in_parts_of_about_ageing_rows() -> None:
    unit = np.arange(256, dtype=np.int32) % 4
    found = turns(order_of(unit, np.zeros(256), Wishes(ageing=15)))
    assert max(len(rows) for rows, _ in found) >= 16 and len(found) <= 20


def test_units_that_hang_on_one_larger_prefix_stand_together_by_the_worth_of_all() -> None:
    # Nodes 0 and 2 are large, 1 hangs on 0; rows stand alone or in pairs, those of the two mixed.
    node = np.array([0, 2, 1, 2, 1, 2, 0, -1], np.int32)
    parent = np.array([-1, 0, -1], np.int32)
    unit = np.array([0, 1, 2, 3, 2, 1, 4, 5], np.int32)
    order = UnitOrder(np.arange(8), unit, node, parent, np.ones(8, np.int64), Wishes(ageing=99))
    order.sort(np.array([2.0, 1, 5, 9, 5, 1, 3, 4]))
    # All of node 0 is worth 15 / 4, of node 2 11 / 3; the lone row is worth 4 and stands first.
    assert [rows for rows, _ in turns(order)] == [[7], [2, 4], [6], [0], [3], [1, 5]]


def test_prefixes_larger_than_a_unit_are_named_from_the_top() -> None:
    node, parent = np.array([2, 2, 1, 0, 3, -1], np.int32), np.array([-1, 0, 1, -1], np.int32)
    members, begin = np.arange(6, dtype=np.int32), np.array([0, 1, 2, 3, 4, 5, 6], np.int32)
    found = larger_prefixes(node, parent, members, begin)
    assert found.tolist() == [[0, 1, 2], [0, 1, 2], [0, 1, -1], [0, -1, -1], [-1] * 3, [-1] * 3]
    assert larger_prefixes(node[5:], parent, members[:1], begin[:2]).shape == (1, 0)
