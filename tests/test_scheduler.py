"""Decisions of rank 0 as two lists: events in, instructions out."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bgmpi.coroutine import State
from bgmpi.errors import InternalError
from bgmpi.primitives import Admit, Arrived, InputEnded, Moved, Refused, Reported, Run, Stop
from bgmpi.scheduler import Rules, Scheduler

RULES = Rules(round_steps=64, page_tokens=64)


def ids(*names: int) -> np.ndarray:
    return np.array(names, np.int64)


def report(rank: int, *moves: tuple[State, list[int]], **facts: int | float) -> Reported:
    have: dict[str, int | float] = {"free_pages": 100, "pool_pages": 100, "slots_free": 8, "backlog": 0}
    moved = tuple(Moved(int(state), np.array(names, np.int64)) for state, names in moves)
    return Reported(rank=rank, moves=moved, **(have | facts))  # type: ignore[arg-type]


def arrived(*names: int, prompt: int = 10, cap: int = 10) -> Arrived:
    return Arrived(ids(*names), np.full(len(names), prompt), np.full(len(names), cap))


def admitted(instructions: list[list[object]]) -> list[list[int]]:
    return [[int(n) for i in rank if isinstance(i, Admit) for n in i.sequences] for rank in instructions]


def test_sequences_go_to_the_rank_with_least_work() -> None:
    scheduler = Scheduler(4, 2, RULES)
    long = Arrived(ids(0), np.array([10]), np.array([900]))
    got = scheduler.handle([report(0), report(1), long, arrived(1, 2, 3), InputEnded()])
    assert admitted(got) == [[0], [1, 2, 3]]
    scheduler.check()


def test_no_rank_is_given_more_than_it_has_room_for() -> None:
    scheduler = Scheduler(100, 2, RULES)
    got = scheduler.handle([report(0, slots_free=2), report(1, slots_free=0), arrived(*range(100))])
    assert [len(names) for names in admitted(got)] == [6, 4]
    assert scheduler.queued == 90
    assert all(isinstance(rank[-1], Run) and rank[-1].more for rank in got)


def test_every_rank_gets_the_same_number_of_steps_also_without_work() -> None:
    scheduler = Scheduler(1, 3, RULES)
    got = scheduler.handle([report(0), report(1), report(2), arrived(0), InputEnded()])
    runs = [rank[-1] for rank in got]
    assert all(isinstance(run, Run) for run in runs)
    assert len({run.steps for run in runs if isinstance(run, Run)}) == 1


def test_slow_steps_make_short_rounds() -> None:
    scheduler = Scheduler(1, 1, RULES)
    got = scheduler.handle([report(0, steps=10, seconds=5.0), arrived(0)])
    assert got[0][-1].steps == 4  # type: ignore[union-attr]


def test_the_job_stops_when_the_input_ended_and_all_ended() -> None:
    scheduler = Scheduler(2, 1, RULES)
    scheduler.handle([report(0), arrived(0), Refused(ids(1)), InputEnded()])
    got = scheduler.handle([report(0, (State.ACTIVE, [0]), (State.DONE, [0]))])
    assert [type(i) for i in got[0]] == [Stop]
    assert scheduler.ended == 2


def test_an_empty_job_stops_at_once() -> None:
    assert [type(i) for rank in Scheduler(0, 2, RULES).handle([InputEnded()]) for i in rank] == [Stop, Stop]


def test_a_report_about_another_ranks_sequence_is_refused() -> None:
    scheduler = Scheduler(1, 2, RULES)
    scheduler.handle([report(0), report(1), arrived(0)])
    with pytest.raises(InternalError, match="rank 1 reports sequence 0 of rank 0"):
        scheduler.handle([report(1, (State.ACTIVE, [0]))])


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 300)), max_size=60),
    st.integers(1, 5),
    st.integers(1, 6),
    st.randoms(use_true_random=False),
)
@settings(deadline=None, max_examples=100)
def test_every_sequence_is_admitted_once_and_the_job_ends(
    jobs: list[tuple[int, int]], ranks: int, slots: int, random: object
) -> None:
    """A toy of the ranks: each starts what fits and ends, yields or resumes at random."""
    scheduler = Scheduler(len(jobs), ranks, RULES)
    waiting: list[deque[int]] = [deque() for _ in range(ranks)]
    active: list[set[int]] = [set() for _ in range(ranks)]
    seen: list[int] = []
    unread = deque(range(len(jobs)))
    moves: list[list[tuple[State, list[int]]]] = [[] for _ in range(ranks)]
    for _ in range(5000):
        events: list[object] = [
            report(r, *moves[r], slots_free=slots - len(active[r]), free_pages=slots * 5 - len(active[r]) * 5,
                   pool_pages=slots * 5, steps=1, seconds=0.01)
            for r in range(ranks)
        ]
        moves = [[] for _ in range(ranks)]
        take = [unread.popleft() for _ in range(min(scheduler.wanted() or 1, len(unread)))]
        if take:
            sizes = np.array([jobs[i] for i in take])
            events.append(Arrived(np.array(take), sizes[:, 0], sizes[:, 1]))
        if not unread:
            events.append(InputEnded())
        got = scheduler.handle(events)  # type: ignore[arg-type]
        scheduler.check()
        if isinstance(got[0][0], Stop):
            assert sorted(seen) == list(range(len(jobs)))
            assert scheduler.ended == len(jobs)
            return
        for r, names in enumerate(admitted(got)):
            seen.extend(names)
            waiting[r].extend(names)
            while waiting[r] and len(active[r]) < slots:
                name = waiting[r].popleft()
                active[r].add(name)
                moves[r].append((State.ACTIVE, [name]))
            for name in sorted(active[r]):
                dice = random.random()  # type: ignore[attr-defined]
                if dice < 0.1:
                    moves[r].extend([(State.YIELDED, [name]), (State.ACTIVE, [name])])
                elif dice < 0.6:
                    moves[r].append((State.DONE if dice < 0.5 else State.FAILED, [name]))
                    active[r].discard(name)
    raise AssertionError("5,000 rounds and the job has not ended")
