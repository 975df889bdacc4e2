"""Laws of the list of who is where: sums that equal the table, one owner, progress by report or by steps."""

from __future__ import annotations

import numpy as np
import pytest

from bgmpi.coroutine import IllegalMove, State
from bgmpi.errors import InternalError
from bgmpi.primitives import Arrived, Migrate, Moved, Partition, Reported
from bgmpi.roster import Roster


def ids(*names: int) -> np.ndarray:
    return np.array(names, np.int64)


def report(rank: int, *moves: tuple[State, list[int]], **facts: object) -> Reported:
    moved = tuple(Moved(int(state), np.array(names, np.int64)) for state, names in moves)
    return Reported(rank, moved, 9, 9, 9, 0, **facts)  # type: ignore[arg-type]


def roster(*active: int, ranks: int = 2, sequences: int = 6, cap: int = 2000) -> Roster:
    """All sequences on rank 0, `active` ones running."""
    roster = Roster(sequences, ranks)
    names = np.arange(sequences)
    roster.arrive(Arrived(names, np.full(sequences, 100), np.full(sequences, cap)))
    roster.give(names, np.zeros(sequences, np.int64))
    roster.report([report(0, (State.ACTIVE, list(active)))])
    roster.check()
    return roster


def test_many_small_moves_of_one_report_happen_in_their_order() -> None:
    one = roster()
    one.report([report(0, *[(state, [name]) for name in range(3) for state in (
        State.ACTIVE, State.YIELDED, State.ACTIVE, State.DONE if name else State.FAILED)])])
    assert one.table.counts[[State.WAITING, State.DONE, State.FAILED]].tolist() == [3, 2, 1]
    assert one.table.story(1).count("->") == 4
    one.check()


def test_a_report_in_the_wrong_order_is_refused() -> None:
    with pytest.raises(IllegalMove, match="sequence 0: waiting -> done"):
        roster().report([report(0, (State.DONE, [0]), (State.ACTIVE, [0]))])


def test_progress_is_what_was_reported_and_a_token_a_step_since() -> None:
    one = roster(0, 1)
    one.report([report(0, steps=10, active=ids(0), decoded=ids(3))])
    assert one.decoded(ids(0, 1, 2)).tolist() == [3, 10, 0]
    one.report([report(0, steps=5)])
    assert one.decoded(ids(0, 1, 2)).tolist() == [8, 15, 0]
    one.hold(ids(1))
    one.report([report(0, steps=7)])
    assert one.decoded(ids(0, 1)).tolist() == [15, 15]


@pytest.mark.parametrize(("cap", "steps", "guess"), [(100, 40, 60), (100, 100, 1), (5000, 24, 1000), (5000, 3000, 2000),
                                                     (9000, 3000, 3000)])
def test_what_remains_is_guessed_and_never_above_the_cap(cap: int, steps: int, guess: int) -> None:
    one = roster(0, cap=cap)
    one.report([report(0, steps=steps)])
    assert one.remaining(ids(0)).tolist() == [guess]


def test_effort_and_progress_move_with_a_sequence() -> None:
    one = roster(0)
    one.report([report(0, steps=9)])
    one.hold(ids(0))
    before = one.work.copy()
    one.depart(Migrate(ids(0, 1), 0, 1))
    one.check()
    np.testing.assert_array_equal(one.work, before)
    one.report([report(1, (State.YIELDED, [0]), (State.WAITING, [1]), (State.ACTIVE, [0, 1])), report(0)])
    assert one.work.tolist() == [4 * one.effort[0], 2 * one.effort[0]]
    assert one.decoded(ids(0)).tolist() == [9]
    one.check()


def test_a_group_takes_ranks_that_have_nothing_else() -> None:
    with pytest.raises(InternalError, match="has 5 other sequences"):
        roster(0).regroup(Partition(0, 0, 0, 2))
    one = roster(0, sequences=1)
    with pytest.raises(InternalError, match="the leader must own the sequence"):
        one.regroup(Partition(0, 1, 0, 2))
    one.regroup(Partition(0, 0, 0, 2))
    one.check()
    assert one.in_groups().all()
    one.regroup(Partition(0, 0, 0, 1))
    assert one.table.state[0] == State.YIELDED and not one.groups
    one.check()


def test_a_group_that_could_not_be_made_is_remembered_until_the_next_reports() -> None:
    one = roster(0, sequences=1)
    one.regroup(Partition(0, 0, 0, 2))
    one.report([report(0, (State.YIELDED, [0]), (State.ACTIVE, [0]))])
    assert one.failed_groups == [0] and not one.groups
    one.check()
    one.report([report(0)])
    assert not one.failed_groups


def test_a_sequence_that_is_not_its_sources_cannot_move() -> None:
    for wrong in (Migrate(ids(1), 1, 0), Migrate(ids(1), 0, 0)):
        with pytest.raises(InternalError, match="does not move sequences of rank"):
            roster(0).depart(wrong)
    with pytest.raises(IllegalMove, match="active -> moving"):
        roster(0).depart(Migrate(ids(0), 0, 1))


def test_check_finds_a_sum_that_left_the_table() -> None:
    one = roster(0)
    one.count[0, State.ACTIVE] += 1
    with pytest.raises(InternalError, match="sequences a rank and state"):
        one.check()
