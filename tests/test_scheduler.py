"""Decisions of rank 0 as two lists: events in, instructions out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks_for_tests import Toy, dice, live

from bgmpi.coroutine import State
from bgmpi.drill import Drill
from bgmpi.errors import InternalError
from bgmpi.long_tail import TailRules
from bgmpi.primitives import (
    Admit,
    Arrived,
    Combine,
    InputEnded,
    Migrate,
    Moved,
    Refused,
    Reported,
    Run,
    Stop,
    StopAsked,
    Yield,
)
from bgmpi.scheduler import Rules, Scheduler
from bgmpi.trace import TraceWriter, read_trace

RULES = Rules(round_steps=64, page_tokens=64, tail=TailRules(shares={2: 0.6, 4: 0.4}))


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


def test_a_round_is_said_in_one_order_and_moves_and_groups_to_all() -> None:
    scheduler = Scheduler(8, 2, RULES, Drill(yields=1, migrations=3))
    given = admitted(scheduler.handle([report(0), report(1), arrived(*range(8)), InputEnded()]))
    assert [len(names) for names in given] == [4, 4]
    held = scheduler.handle([report(rank, (State.ACTIVE, names)) for rank, names in enumerate(given)])
    assert [[type(i) for i in rank] for rank in held] == [[Yield, Run]] * 2
    got = scheduler.handle([report(0), report(1)])
    assert [[type(i) for i in rank] for rank in got] == [[Yield, Migrate, Migrate, Combine, Run]] * 2
    assert [(m.source, m.target) for m in got[0] if isinstance(m, Migrate)] == [(0, 1), (1, 0)]
    scheduler.check()
    moving = [m.sequences for m in got[0] if isinstance(m, Migrate)]
    resumed = [i.sequences for rank in got for i in rank if isinstance(i, Combine)]
    assert not np.isin(np.concatenate(resumed), np.concatenate(moving)).any()


def moved(scheduler: Scheduler) -> Migrate:
    """Let sequence 0 of rank 0 be on its way to rank 1."""
    scheduler.handle([report(0), report(1), arrived(0, cap=5), InputEnded()])
    owner = int(scheduler.table.owner[0])
    said = scheduler.handle([report(owner, (State.ACTIVE, [0])), report(1 - owner)])
    assert scheduler.table.state[0] == State.MOVING and scheduler.table.owner[0] == owner
    (move,) = [one for one in said[0] if isinstance(one, Migrate)]
    return move


def test_who_reports_a_moving_sequence_owns_it_from_then_on() -> None:
    scheduler = Scheduler(1, 2, RULES, Drill(migrations=2))
    move = moved(scheduler)
    scheduler.handle([report(move.source), report(move.target, (State.YIELDED, [0]), (State.ACTIVE, [0]))])
    assert scheduler.table.owner[0] == move.target
    assert scheduler.roster.work[move.source] == 0 and scheduler.roster.work[move.target] > 0
    scheduler.check()


def test_a_copy_that_failed_leaves_the_owner_and_shuns_the_target() -> None:
    scheduler = Scheduler(1, 2, RULES, Drill(migrations=2))
    move = moved(scheduler)
    for _ in range(8):
        said = scheduler.handle([report(move.source, (State.YIELDED, [0])), report(move.target)]
                                if scheduler.table.state[0] == State.MOVING else [report(0), report(1)])
        assert not any(isinstance(one, Migrate) for one in said[0])
    assert scheduler.table.owner[0] == move.source
    scheduler.check()


def test_a_moving_sequence_that_nobody_reports_is_an_error() -> None:
    scheduler = Scheduler(1, 2, RULES, Drill(migrations=2))
    moved(scheduler)
    with pytest.raises(InternalError, match="told to move and no rank reports them, the first is 0"):
        scheduler.handle([report(0), report(1)])


def test_a_held_sequence_that_runs_is_an_error() -> None:
    scheduler = Scheduler(1, 1, RULES, Drill(yields=2))
    scheduler.handle([report(0), arrived(0), InputEnded()])
    scheduler.handle([report(0, (State.ACTIVE, [0]))])
    scheduler.handle([report(0)])
    said = scheduler.handle([report(0)])
    assert isinstance(said[0][0], Yield)
    with pytest.raises(InternalError, match="sequence 0 runs, though it was told to yield"):
        scheduler.handle([report(0, (State.ACTIVE, [0]))])


def test_uneven_ranks_are_evened_out_only_once_the_queue_is_empty() -> None:
    rules = replace(RULES, migrate=True)
    scheduler = Scheduler(64, 2, rules)
    free = [report(rank, slots_free=64) for rank in range(2)]
    given = admitted(scheduler.handle([*free, arrived(*range(60), cap=999)]))
    assert [len(names) for names in given] == [30, 30]
    measured = {"steps": 64, "generated_tokens": 64 * 30, "seconds": 90.0, "slots_free": 34}
    both = report(0, (State.ACTIVE, given[0]), **measured), report(1, (State.ACTIVE, given[1]), **measured)
    done = report(0, **measured), report(1, (State.DONE, given[1]), **(measured | {"slots_free": 64}))
    for events in (both, (*done, arrived(60, 61, cap=999))):
        got = scheduler.handle(events)
        assert not any(isinstance(one, Migrate) for one in got[0])
    (fresh,) = [names for names in admitted(got) if names]
    assert fresh == [60, 61]
    end = [arrived(62, 63, cap=999), InputEnded()]
    got = scheduler.handle([report(0, slots_free=34), report(1, (State.ACTIVE, fresh)), *end])
    assert admitted(got)[1] == [62, 63] and not any(isinstance(one, Migrate) for one in got[0])
    got = scheduler.handle([report(0, slots_free=34), report(1, (State.ACTIVE, [62, 63]), slots_free=60)])
    assert [type(i) for i in got[0]] == [Yield, Migrate, Run] and [type(i) for i in got[1]] == [Migrate, Run]
    (move,) = [one for one in got[0] if isinstance(one, Migrate)]
    assert (move.source, move.target) == (0, 1) and 8 <= len(move.sequences) <= 14


def test_rounds_are_short_while_the_tail_may_be_decided_and_long_when_it_is() -> None:
    lengths = [30] * 20 + [900]
    toy, steps = Toy(lengths, 2, slots=16, pages=400), []
    rules = replace(RULES, migrate=True, partition=True)

    def watch(events: list[object], said: list[list[object]]) -> None:
        steps.append((scheduler.table.counts[State.SHARDED], said[0][-1]))

    scheduler = Scheduler(len(lengths), 2, rules)
    live(scheduler, toy, [1000] * len(lengths), watch=watch)
    runs = [(sharded, run.steps) for sharded, run in steps if isinstance(run, Run)]
    assert runs[-2:] == [(1, 64), (1, 64)]
    assert min(count for sharded, count in runs if sharded) == 1


@given(st.integers(0, 1000), st.integers(1, 4), st.booleans())
@settings(deadline=None, max_examples=10)
def test_a_trace_replays_to_the_same_instructions(seed: int, ranks: int, drilled: bool) -> None:
    lengths = [1 + (seed * 7 + i * 31) % 90 for i in range(30)] + [300]
    rules = replace(RULES, migrate=True, partition=True, round_steps=8)
    drill = Drill(2, 3, 3) if drilled else Drill()
    toy = Toy(lengths, ranks, slots=6, pages=60, fails=dice(seed, 0.1), hiccups=dice(seed, 0.02))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        scheduler = Scheduler(len(lengths), ranks, rules, drill)
        with TraceWriter(path) as trace:
            live(scheduler, toy, [400] * len(lengths),
                 watch=lambda events, said: trace.round(scheduler.round_number, 0.0, events, said))
        again, rounds = Scheduler(len(lengths), ranks, rules, drill), 0
        for one in read_trace(path):
            assert told(again.handle(one.events)) == told(one.instructions)
            again.check()
            rounds += 1
    assert rounds == scheduler.round_number


def told(instructions: object) -> bytes:
    return msgspec.json.encode(instructions, enc_hook=lambda value: np.asarray(value).tolist())


def test_a_signal_on_one_rank_stops_all_at_the_same_boundary() -> None:
    scheduler = Scheduler(3, 2, RULES)
    scheduler.handle([report(0), report(1), arrived(0, 1), InputEnded()])
    quiet, asked = report(0), replace_report(report(1), stop="SIGUSR1")
    said = scheduler.handle([quiet, asked])
    assert [[type(one) for one in rank] for rank in said] == [[Stop], [Stop]]
    (first,), (second,) = said
    assert isinstance(first, Stop) and isinstance(second, Stop)
    assert first.reason == second.reason == "SIGUSR1 came to rank 1" and first.code == second.code == 75
    scheduler.check()


def replace_report(one: Reported, **facts: str) -> Reported:
    return msgspec.structs.replace(one, **facts)


def test_a_signal_after_the_last_answer_stops_nothing_but_too_many_errors_do() -> None:
    for asked, reason in ((StopAsked("wall time", 75), ""), (StopAsked("errors", 70), "errors")):
        scheduler = Scheduler(1, 1, RULES)
        (last,) = scheduler.handle([Refused(ids(0)), InputEnded(), asked])[0]
        assert isinstance(last, Stop) and last.reason == reason
