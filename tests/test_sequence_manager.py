"""Laws of one rank's active set, driven without a device: what is planned, who yields, that everyone ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from one_rank import TIERS, advance, boundary, entry, make, run_to_end

from bgmpi.coroutine import State
from bgmpi.errors import InternalError
from bgmpi.eviction import Hold, Way
from bgmpi.request import Finish
from bgmpi.sequence_manager import SequenceManager


def test_a_long_prompt_is_cut_to_the_budget_behind_the_decoding_ones() -> None:
    manager = make()
    manager.admit([entry(0, 3, 9), entry(1, 40, 9)])
    manager.refill()
    plan = manager.plan()
    assert plan is not None
    assert np.diff(plan.first).tolist() == [3, 13]
    assert plan.emits.tolist() == [True, False]
    advance(manager)
    plan = manager.plan()
    assert plan is not None
    assert manager.active_set.sequence[plan.slots].tolist() == [0, 1]
    assert np.diff(plan.first).tolist() == [1, 15]
    assert plan.before.tolist() == [3, 13]
    assert plan.positions.tolist() == [3, *range(13, 28)]
    assert plan.ids[0] == 3


def test_a_prompt_with_no_token_to_generate_ends_after_its_prefill() -> None:
    manager = make()
    manager.admit([entry(5, 20, 0)])
    manager.refill()
    assert advance(manager) == []
    assert advance(manager) == [(5, 20)]
    assert manager.kv.free == 64


def test_the_last_token_allowed_ends_by_length_and_a_stop_wins_over_it() -> None:
    manager = make()
    manager.admit([entry(0, 2, 1), entry(1, 2, 1)])
    manager.refill()
    plan = manager.plan()
    assert plan is not None
    ended = manager.commit(plan, np.array([7, 7], np.int32), np.array([False, True]), np.zeros(2, bool))
    assert ended.finish.tolist() == [Finish.LENGTH, Finish.STOP]


def test_a_fault_ends_only_its_own_sequence_and_adds_no_token() -> None:
    manager = make()
    manager.admit([entry(0, 2, 5), entry(1, 2, 5)])
    manager.refill()
    plan = manager.plan()
    assert plan is not None
    ended = manager.commit(plan, np.array([-1, 7], np.int32), np.zeros(2, bool), np.array([True, False]))
    assert manager.active_set.sequence[ended.slots].tolist() == [0]
    assert manager.active_set.known[ended.slots].tolist() == [2]
    manager.retire(ended)
    assert [State(m.state) for m in manager.take_moves()] == [State.ACTIVE, State.FAILED]
    assert manager.active_set.sequence[manager.active].tolist() == [1]


def test_a_sequence_that_ends_is_replaced_before_the_next_step() -> None:
    manager = make(slots=1, budget=8)
    manager.admit([entry(0, 2, 1), entry(1, 2, 1)])
    manager.refill()
    assert advance(manager) == [(0, 3)]
    assert [e.sequence for _, e in manager.refill()] == [1]


def test_the_longest_decoded_yields_but_never_the_oldest() -> None:
    manager = make(slots=3, pages=9, hold=Hold.LONGEST)
    manager.admit([entry(0, 4, 28), entry(1, 4, 28), entry(2, 4, 28)])
    manager.refill()
    yielded: list[int] = []
    while not yielded:
        for _ in range(4):
            advance(manager)
        yielded = boundary(manager)
    assert yielded[0] != 0
    moves = [(State(m.state), m.sequences.tolist()) for m in manager.take_moves()]
    assert (State.YIELDED, yielded) in moves


def test_what_a_yield_threw_away_is_counted_when_it_is_computed_again() -> None:
    manager = make(slots=2, pages=7)
    manager.admit([entry(0, 4, 16), entry(1, 4, 16)])
    run_to_end(manager, {})
    assert manager.tokens.wasted > 0
    assert manager.tokens.generated == 32


def test_an_entry_that_can_never_fit_is_an_internal_error_here() -> None:
    with pytest.raises(InternalError, match="should have been refused"):
        make(pages=2).admit([entry(0, 4, 100)])


@pytest.mark.parametrize("tiers", TIERS.values(), ids=TIERS.keys())
@given(
    jobs=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30), st.integers(1, 30)), min_size=1, max_size=14),
    slots=st.integers(1, 4),
    extra_pages=st.integers(0, 30),
    budget=st.integers(4, 12),
    hold=st.sampled_from(Hold),
    levels=st.lists(st.integers(0, 3), min_size=14, max_size=14),
)
@settings(deadline=None, max_examples=25)
def test_every_sequence_ends_once_with_its_tokens_whatever_the_pools_and_levels(
    tiers: dict[str, Any], jobs: list[tuple[int, int, int]], slots: int, extra_pages: int, budget: int, hold: Hold,
    levels: list[int],
) -> None:
    fits = max(-(-(prompt + new) // 4) for prompt, new, _ in jobs)
    manager = make(slots=slots, pages=fits + extra_pages, budget=budget, hold=hold, **tiers)
    manager.admit([entry(i, prompt, new, levels[i]) for i, (prompt, new, _) in enumerate(jobs)])
    ended = run_to_end(manager, {i: stop for i, (_, _, stop) in enumerate(jobs)})
    assert ended == {i: prompt + min(new, stop) for i, (prompt, new, stop) in enumerate(jobs)}
    for pool in (manager.places.home, manager.places.device, manager.places.disk):
        assert pool is None or pool.free == pool.pages
    assert manager.tokens.generated == sum(min(new, stop) for _, new, stop in jobs)
    assert manager.tokens.prompt - manager.tokens.wasted <= sum(prompt for prompt, _, _ in jobs)


def test_the_more_urgent_start_first_and_equals_in_their_order() -> None:
    manager = make(slots=3)
    manager.admit([entry(0, 2, 9, 1), entry(1, 2, 9, 1), entry(2, 2, 9, 0)])
    manager.arrive(entry(3, 2, 9, 0))
    manager.refill()
    assert manager.active_set.sequence[manager.active].tolist() == [2, 3, 0]


@pytest.mark.parametrize("hold", Hold)
def test_the_least_urgent_yields_whomever_the_hold_policy_would_name(hold: Hold) -> None:
    manager = make(pages=13, hold=hold)
    less, more = [entry(7, 4, 12, 1)], [entry(0, 4, 20), entry(1, 4, 20)]
    for entries in (less, more) if hold is Hold.SHORTEST else (more, less):
        manager.admit(entries)
        manager.refill()
        for _ in range(2):
            advance(manager)
    gave_up: list[int] = []
    while not gave_up:
        gave_up = boundary(manager)
        advance(manager)
    assert gave_up == [7]


def test_how_urgent_a_sequence_is_stays_with_it_when_it_yields() -> None:
    manager = make()
    manager.admit([entry(0, 2, 9, 1), entry(1, 2, 9, 5)])
    manager.refill()
    advance(manager)
    manager.suspend(np.array([0, 1]))
    assert [(one.sequence, one.level) for one in manager.leave(np.array([1, 0]))] == [(1, 5), (0, 1)]


def test_the_disk_lets_more_be_active_than_the_home_holds() -> None:
    manager = make(slots=8, pages=26, disk_pages=200, streamed_most=15)
    manager.admit([entry(i, 16, 16) for i in range(8)])
    most = 0
    for _ in range(12):
        boundary(manager)
        most = max(most, len(manager.active))
        for _ in range(4):
            if manager.plan() is not None:
                advance(manager)
    assert most >= 6
    assert manager.tokens.wasted == 0


def test_with_a_disk_only_pages_that_still_fill_are_at_home_while_others_wait() -> None:
    """Of 6 pages of a sequence 2 at most are at home then, so a home of 60 holds 30 sequences and more."""
    manager = make(slots=40, pages=60, budget=400, disk_pages=400, streamed_most=15)
    manager.admit([entry(i, 16, 8) for i in range(8)])
    boundary(manager)
    advance(manager)
    assert len(manager.active) == 8  # in no need of the disk
    assert not manager.places.spills(manager.active).any()
    manager.admit([entry(i, 16, 8) for i in range(8, 120)])
    for _ in range(2):
        boundary(manager)
        advance(manager)
    assert len(manager.active) >= 28
    for _ in range(3):
        boundary(manager)
        assert len(manager.active) >= 28
        for _ in range(4):
            advance(manager)
    assert manager.tokens.wasted == 0


def test_what_is_suspended_keeps_its_kv_and_goes_on_where_it_was() -> None:
    manager = make()
    manager.admit([entry(0, 6, 9), entry(1, 5, 9)])
    boundary(manager)
    advance(manager)
    manager.suspend(np.array([0]))
    manager.check()
    advance(manager)
    assert manager.active_set.sequence[manager.active].tolist() == [1]
    assert manager.kv.parked == 2
    manager.backlog.combine(np.array([0]))
    boundary(manager)
    plan = manager.plan()
    assert plan is not None
    assert plan.before.tolist() == [6, 6]
    assert manager.active_set.sequence[plan.slots].tolist() == [0, 1]
    run_to_end(manager, {})
    assert manager.tokens.wasted == 0
    assert [State(m.state) for m in manager.take_moves()] == [State.ACTIVE, State.DONE]


def test_kept_kv_is_given_up_before_anybody_active_yields() -> None:
    manager = make(pages=10)
    manager.admit([entry(0, 8, 30), entry(1, 8, 30)])
    boundary(manager)
    advance(manager)
    manager.suspend(np.array([1]))
    ended = run_until(manager, lambda: manager.kv.parked == 0)
    assert not ended
    assert manager.active_set.sequence[manager.active].tolist() == [0]


def run_until(manager: SequenceManager, done: Any) -> list[int]:
    gave_up: list[int] = []
    for _ in range(50):
        gave_up += boundary(manager)
        if done():
            return gave_up
        for _ in range(4):
            advance(manager)
    raise AssertionError("it never came to pass")


@pytest.mark.parametrize(("hold", "first"), [(Hold.LONGEST, 1), (Hold.SHORTEST, 2)])
def test_the_hold_policy_names_who_yields(hold: Hold, first: int) -> None:
    manager = make(slots=3, pages=16, hold=hold)
    manager.admit([entry(0, 4, 28), entry(1, 4, 28)])
    boundary(manager)
    for _ in range(3):
        advance(manager)
    manager.admit([entry(2, 4, 28)])
    yielded: list[int] = []
    while not yielded:
        yielded = boundary(manager)
        for _ in range(4):
            advance(manager)
    assert yielded[0] == first


def test_a_device_that_runs_dry_sends_kv_home_and_nobody_stops() -> None:
    manager = make(slots=3, device_pages=9, streamed_most=15)
    manager.admit([entry(i, 4, 28) for i in range(3)])
    ways = []
    for _ in range(6):
        while (eviction := manager.evict()) is not None:
            ways.append(eviction.way)
            manager.evicted(eviction)
        manager.refill()
        manager.promoted(manager.promote())
        for _ in range(4):
            plan = manager.plan()
            assert plan is not None
            assert len(plan.slots) == 3
            advance(manager)
    assert set(ways) == {Way.DEMOTE}
    assert manager.tokens.wasted == 0
