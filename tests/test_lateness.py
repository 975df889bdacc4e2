"""Laws of who is named: the one that all wait for, never its victims, and nobody for silence alone."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bgmpi.lateness import Alarm, Limits, Seen, Stall, judge

PATIENCE = 20.0


def seen(rank: int, still: float, *, waits: bool = False, silent: float = 0.0, begun: bool = True) -> Seen:
    return Seen(rank, f"n{rank}", "a step", waits, begun, still, silent)


def named(*ranks: Seen) -> tuple[float, list[int]] | None:
    stall = judge(ranks, PATIENCE)
    return None if stall is None else (stall.seconds, [one.rank for one in stall.culprits])


def test_who_stands_still_is_named_and_not_those_that_wait_for_it() -> None:
    assert named(seen(0, 99, waits=True), seen(1, 98), seen(2, 99, waits=True)) == (98, [1])


def test_of_two_that_stand_still_both_are_named() -> None:
    assert named(seen(0, 90), seen(1, 98), seen(2, 0.1)) == (98, [0, 1])


def test_waiting_for_a_rank_that_goes_on_is_no_stall() -> None:
    assert named(seen(0, 900, waits=True), seen(1, 0.5)) == (0.5, [1])


def test_where_all_wait_the_silent_one_is_named_since_when_the_last_began_to_wait() -> None:
    assert named(seen(0, 70, waits=True), seen(1, 80, waits=True, silent=75), seen(2, 60, waits=True)) == (60, [1])


def test_where_all_wait_and_answer_all_are_named() -> None:
    assert named(seen(0, 70, waits=True), seen(1, 60, waits=True)) == (60, [0, 1])


def test_silence_alone_is_no_fault() -> None:
    assert named(seen(0, 0.2), seen(1, 900, silent=900)) == (0.2, [0])


def test_waiting_proves_nothing_where_a_rank_was_never_heard() -> None:
    unheard = Seen(2, "?", "starting", False, False, inf, inf)
    assert named(seen(0, 900, waits=True), seen(1, 900, waits=True), unheard) is None
    assert named(seen(0, 900, waits=True), seen(1, 800), unheard) == (800, [1])


def test_a_lone_rank_is_its_own_culprit() -> None:
    assert named(seen(0, 50)) == (50, [0])


_ranks = st.lists(
    st.tuples(st.floats(0, 1e4), st.booleans(), st.one_of(st.just(0.0), st.floats(0, 1e4), st.just(inf))),
    min_size=1, max_size=6,
)  # fmt: skip


@given(_ranks)
def test_no_victim_is_named_and_no_stall_is_longer_than_what_was_heard(facts: list[tuple[float, bool, float]]) -> None:
    everyone = [seen(rank, still, waits=waits, silent=silent) for rank, (still, waits, silent) in enumerate(facts)]
    everyone[0] = seen(0, facts[0][0], waits=facts[0][1])  # who judges hears itself
    stall = judge(everyone, PATIENCE)
    heard = [one for one in everyone if one.silent <= PATIENCE]
    busy = [one for one in heard if not one.waits]
    if stall is None:
        assert not busy and any(one.silent == inf for one in everyone)
        return
    assert stall.culprits and stall.seconds <= max(one.still for one in heard)
    assert not busy or set(stall.culprits) <= set(busy)
    assert not stall.silent or all(one.silent > PATIENCE for one in stall.culprits)


@pytest.mark.parametrize("begun", [False, True])
def test_before_its_first_step_a_rank_has_the_time_of_the_start(begun: bool) -> None:
    limits = Limits(heartbeat=600, startup=1800)
    stall = judge([seen(0, 700, begun=begun), seen(1, 700, waits=True)], PATIENCE)
    assert stall is not None
    assert (stall.seconds >= limits.end(begun=stall.begun)) == begun


def test_no_limit_of_the_start_means_that_it_never_ends_the_job_and_still_warns() -> None:
    limits = Limits(heartbeat=600, startup=0)
    assert limits.end(begun=False) == inf and limits.warning(begun=False) == 60


@given(st.floats(0.1, 1e5), st.floats(0, 1e5))
def test_a_silent_rank_can_be_told_before_the_first_warning(heartbeat: float, startup: float) -> None:
    limits = Limits(heartbeat, startup)
    for begun in (False, True):
        assert limits.warning(begun=begun) > limits.patience > limits.interval > 0


def test_a_warning_comes_once_then_at_growing_intervals_and_at_once_for_another_phase() -> None:
    alarm = Alarm()

    def due(seconds: float, phase: str = "a step") -> bool:
        return alarm.due(Stall(seconds, (Seen(1, "n1", phase, False, True, seconds),), True), 60)

    assert [at for at in range(0, 600, 5) if due(at)] == [60, 120, 240, 480]
    assert not due(59, "publishing") and due(61, "publishing") and not due(62, "publishing")


def test_words_name_rank_host_phase_and_what_they_do() -> None:
    told = judge([seen(0, 99, waits=True), seen(1, 98)], PATIENCE)
    assert told is not None and told.told() == "rank 1/n1 has not gone on for 98 s in 'a step'"
    told = judge([seen(0, 9, waits=True), seen(1, 98, waits=True, silent=97)], PATIENCE)
    assert told is not None and told.told() == "rank 1/n1 has not answered for 97 s, last heard in 'a step'"
    told = judge([seen(rank, 9.25, waits=True) for rank in range(20)], PATIENCE)
    assert told is not None and told.told().startswith("all ranks wait for each other: rank 0/n0 has waited for other")
    assert told.told().endswith("; 12 more")
