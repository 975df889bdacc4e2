"""Laws of one rank's active set, driven without a device: what is planned, who yields, that everyone ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bgmpi.backlog import Entry
from bgmpi.coroutine import State
from bgmpi.errors import InternalError
from bgmpi.kv_places import KvPlaces
from bgmpi.request import Finish
from bgmpi.sequence_manager import Hold, SequenceManager, Way


def entry(sequence: int, prompt: int, new: int, level: int = 0) -> Entry:
    return Entry(sequence, np.arange(prompt, dtype=np.int32), prompt, prompt + new, level=level)


def make(
    slots: int = 4, pages: int = 64, page_tokens: int = 4, budget: int = 16, hold: Hold = Hold.LONGEST, **places: Any
) -> SequenceManager:
    kv = KvPlaces(slots=slots, page_tokens=page_tokens, pages=pages, **places)
    return SequenceManager(kv, slots=slots, budget=budget, most_tokens=200, hold=hold)


def boundary(manager: SequenceManager) -> list[int]:
    """Do what a rank does at a page boundary, bytes left out; -> the sequences that gave up their KV."""
    gave_up: list[int] = []
    for _ in range(200):
        eviction = manager.evict()
        if eviction is None:
            break
        names = manager.active_set.sequence[eviction.slots].tolist()
        if manager.evicted(eviction):
            gave_up += names
        manager.check()
    else:
        raise AssertionError("evictions without end")
    manager.refill()
    if len(back := manager.recall()):
        manager.recalled(back)
    manager.check()
    manager.promoted(manager.promote())
    manager.check()
    return gave_up


def advance(manager: SequenceManager, stop_after: dict[int, int] | None = None) -> list[tuple[int, int]]:
    """Make one step with made-up tokens; -> (sequence, tokens known) of those that ended."""
    plan = manager.plan()
    assert plan is not None
    slots = plan.slots[plan.emits]
    tokens = (manager.active_set.sequence[slots] * 1000 + manager.active_set.known[slots]).astype(np.int32)
    decoded = manager.active_set.known[slots] - manager.active_set.prompt[slots] + 1
    limits = np.array([(stop_after or {}).get(int(s), 10**9) for s in manager.active_set.sequence[slots]])
    ended = manager.commit(plan, tokens, decoded >= limits, np.zeros(len(slots), bool))
    names = [(int(manager.active_set.sequence[s]), int(manager.active_set.known[s])) for s in ended.slots]
    manager.retire(ended)
    manager.check()
    return names


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
    assert manager.wasted_tokens > 0
    assert manager.generated_tokens == 32


def test_an_entry_that_can_never_fit_is_an_internal_error_here() -> None:
    with pytest.raises(InternalError, match="should have been refused"):
        make(pages=2).admit([entry(0, 4, 100)])


def run_to_end(manager: SequenceManager, stops: dict[int, int]) -> dict[int, int]:
    """Run rounds of one page until all ended; -> tokens known at the end by sequence."""
    ended: dict[int, int] = {}
    for _ in range(2000):
        boundary(manager)
        if not len(manager.active):
            assert len(manager.backlog) == 0
            return ended
        for _ in range(manager.kv.page_tokens):
            if manager.plan() is None:
                break
            for name, known in advance(manager, stops):
                assert name not in ended
                ended[name] = known
            manager.refill()
            manager.promoted(manager.promote())
    raise AssertionError("livelock: 2,000 rounds and not all sequences ended")


TIERS: dict[str, dict[str, Any]] = {
    "in place": {},
    "device, streamed decode": {"device_pages": 5, "streamed_most": 15},
    "device, others wait": {"device_pages": 15, "streamed_most": 15, "stream": False},
    "disk": {"disk_pages": 30, "streamed_most": 15},
    "small disk": {"disk_pages": 5, "streamed_most": 15},
    "device and disk": {"device_pages": 6, "disk_pages": 40, "streamed_most": 15},
}


@pytest.mark.parametrize("tiers", TIERS.values(), ids=TIERS.keys())
@given(
    jobs=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30), st.integers(1, 30)), min_size=1, max_size=14),
    slots=st.integers(1, 4),
    extra_pages=st.integers(0, 30),
    budget=st.integers(4, 12),
    hold=st.sampled_from(Hold),
    levels=st.lists(st.integers(0, 3), min_size=14, max_size=14),
)
@settings(deadline=None, max_examples=50)
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
    assert manager.generated_tokens == sum(min(new, stop) for _, new, stop in jobs)
    assert manager.prompt_tokens - manager.wasted_tokens <= sum(prompt for prompt, _, _ in jobs)


@pytest.mark.parametrize("tiers", TIERS.values(), ids=TIERS.keys())
@given(
    jobs=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), min_size=1, max_size=8),
    slots=st.integers(1, 4),
    extra_pages=st.integers(0, 12),
    turns=st.lists(st.integers(0, 15), max_size=40),
)
@settings(deadline=None, max_examples=60)
def test_everybody_ends_whoever_is_suspended_whenever(
    tiers: dict[str, Any], jobs: list[tuple[int, int]], slots: int, extra_pages: int, turns: list[int]
) -> None:
    """KV that suspended ones keep may not stand in the way of the oldest for ever."""
    fits = max(-(-(prompt + new) // 4) for prompt, new in jobs)
    manager = make(slots=slots, pages=fits + extra_pages, **tiers)
    manager.admit([entry(i, prompt, new) for i, (prompt, new) in enumerate(jobs)])
    ended: dict[int, int] = {}
    held = np.empty(0, np.int64)
    for turn in turns:
        boundary(manager)
        names = manager.active_set.sequence[manager.active]
        manager.backlog.combine(held)
        held = names[[bool(turn >> place % 4 & 1) for place in range(len(names))]]
        if manager.places.device is not None:
            resident = manager.active_set.slots_of(held)
            manager.places.end_demotion(resident[manager.places.resident[resident]])
        manager.suspend(held)
        manager.check()
        for _ in range(2):
            if manager.plan() is not None:
                ended |= dict(advance(manager))
    manager.backlog.combine(held)
    ended |= run_to_end(manager, {})
    assert ended == {i: prompt + new for i, (prompt, new) in enumerate(jobs)}
    assert manager.kv.free == manager.kv.pages


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
    assert manager.wasted_tokens == 0


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
    assert manager.wasted_tokens == 0


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
    assert manager.wasted_tokens == 0
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
    assert manager.wasted_tokens == 0
