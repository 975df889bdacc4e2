"""Laws of the state table."""

from __future__ import annotations

import numpy as np
import pytest

from bgmpi.coroutine import IllegalMove, State, StateTable, legal_moves


def test_ended_states_have_no_way_out() -> None:
    table = legal_moves()
    assert not table[State.DONE].any()
    assert not table[State.FAILED].any()


def test_every_live_state_reaches_an_end() -> None:
    reach = legal_moves() | np.eye(len(State), dtype=bool)
    for _ in State:
        reach = (reach.astype(int) @ reach.astype(int)) > 0
    live = [s for s in State if s not in (State.DONE, State.FAILED)]
    assert reach[live, State.DONE].all()
    assert reach[live, State.FAILED].all()


def test_an_illegal_move_changes_nothing_and_tells_the_story() -> None:
    table = StateTable(3)
    one = np.array([1])
    table.move(one, State.ACTIVE, round_number=1)
    table.move(one, State.DONE, round_number=2)
    before = table.state.copy()
    with pytest.raises(IllegalMove, match="round 1: waiting -> active; round 2: active -> done"):
        table.move(np.array([0, 1]), State.ACTIVE)
    np.testing.assert_array_equal(table.state, before)
    table.check()


def test_every_sequence_of_one_call_may_have_a_target_of_its_own() -> None:
    table = StateTable(3)
    table.move(np.arange(3), np.array([State.ACTIVE, State.MOVING, State.FAILED]), round_number=4)
    assert table.state.tolist() == [State.ACTIVE, State.MOVING, State.FAILED]
    assert table.story(1) == "round 4: waiting -> moving"
    with pytest.raises(IllegalMove, match="sequence 2: failed -> done is not a legal move; 1 of 2 refused"):
        table.move(np.array([0, 2]), np.array([State.YIELDED, State.DONE]))
    assert table.state[0] == State.ACTIVE
    table.check()


def test_story_keeps_the_latest_moves_when_it_overflows() -> None:
    table = StateTable(10, story_moves=4)
    table.move(np.arange(10), State.ACTIVE, round_number=7)
    assert table.story(0) == "no move remembered"
    assert table.story(9) == "round 7: waiting -> active"
