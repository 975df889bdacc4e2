"""Answers: how long does rank 0 decide at a page boundary, where all ranks wait for it.

Physics: one pass over the arrays of what changed.  Nothing is computed on a device and nothing crosses MPI; a round of
decode takes tens of milliseconds to seconds, so a decision of 5 ms is lost in it and one of 50 ms would not be.  The
baseline in the same run is a plain sort of as many numbers as sequences wait.

Four rounds are timed, each with 10,000 waiting sequences on 4 ranks: the first, which fills the ranks; one that places
all of them at once; one of the steady state, in which every rank reports some hundred small moves; and one in which the
queue is empty, the backlogs hold them all and the ranks are uneven, so that many are moved.  A decision
waits for nothing, so the time of its thread is what it takes; wall time is printed beside it, which other programs on
the machine stretch.  The limit is held by the worst round's median.  primitive_cost.py can call `decision_time`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from line import Limit, print_line

from bgmpi.balance import Evening
from bgmpi.coroutine import State
from bgmpi.primitives import Admit, Arrived, Event, Ids, InputEnded, Instruction, Migrate, Moved, Reported
from bgmpi.scheduler import Rules, Scheduler

WAITING, RANKS, SLOTS = 10_000, 4, 256
LIMIT_MS = 5.0
Prepared = tuple[Scheduler, list[Event]]


def decision_time(*, quick: bool = False) -> tuple[dict[str, float], list[Limit]]:
    """Time the four rounds -> figures in milliseconds, and the limit."""
    rounds: dict[str, Callable[[int], Prepared]] = {
        "first": first, "place_all": place_all, "steady": steady, "uneven": uneven
    }
    repeats = 11 if quick else 51
    figures: dict[str, float] = {}
    for name, prepare in rounds.items():
        each = [_timed(*prepare(seed)) for seed in range(repeats)]
        figures[f"decision_ms_{name}"] = 1e3 * statistics.median(thread for thread, _ in each)
        figures[f"decision_wall_ms_{name}"] = 1e3 * statistics.median(wall for _, wall in each)
    numbers = np.random.default_rng(0).random(WAITING)
    figures["decision_ms_plain_sort"] = 1e3 * statistics.median(
        _seconds(lambda: np.sort(numbers))[0] for _ in range(repeats)
    )
    worst = max(figures[f"decision_ms_{name}"] for name in rounds)
    return figures, [Limit("decision_ms_worst", worst, LIMIT_MS, "<=")]


# --- the rounds -----------------------------------------------------------------------------------------------------


def first(seed: int) -> Prepared:
    """All have arrived, nothing runs."""
    return _scheduler(WAITING), [*_idle(SLOTS), _arrived(0, WAITING, seed)]


def place_all(seed: int) -> Prepared:
    """All have arrived and all fit."""
    return _scheduler(WAITING), [*_idle(WAITING), _arrived(0, WAITING, seed)]


def steady(seed: int) -> Prepared:
    """Every rank is full; in the last round an eighth of its sequences ended, one after another, and were replaced."""
    scheduler = _scheduler(WAITING + 2 * RANKS * SLOTS)
    given = _given(scheduler.handle([*_idle(SLOTS), _arrived(0, len(scheduler.table), seed)]))
    more = _given(scheduler.handle(_started(given)))
    given = [np.concatenate(pair) for pair in zip(given, more, strict=True)]
    events: list[Event] = []
    for rank, names in enumerate(given):
        pairs = zip(names[: SLOTS // 8], names[SLOTS:][: SLOTS // 8], strict=True)
        moves = [
            Moved(int(state), np.array([name]))
            for old, new in pairs for state, name in ((State.DONE, old), (State.ACTIVE, new))
        ]
        events.append(_report(rank, moves, slots=0))
    return scheduler, events


def uneven(seed: int) -> Prepared:
    """The input ended, all wait in two ranks' backlogs, and the two others are nearly through with what they had."""
    scheduler = _scheduler(2 * WAITING + RANKS * SLOTS)
    given = _given(scheduler.handle([*_idle(2 * WAITING), _arrived(0, len(scheduler.table), seed), InputEnded()]))
    for rank in (1, 3):
        moves = [Moved(int(State.ACTIVE), given[rank]), Moved(int(State.DONE), given[rank][SLOTS:])]
        scheduler.handle([_report(rank, moves, slots=0, prompt_tokens=1)])
    scheduler.handle([
        _report(rank, [Moved(int(State.ACTIVE), given[rank][:SLOTS])], slots=0, prompt_tokens=1) for rank in (0, 2)
    ])
    ends = [[Moved(int(State.DONE), names[i : i + 1]) for i in range(SLOTS // 8)] for names in given]
    return scheduler, [_report(rank, moves, slots=WAITING) for rank, moves in enumerate(ends)]


def _given(said: list[list[Instruction]]) -> list[Ids]:
    return [one.sequences for rank in said for one in rank if isinstance(one, Admit)]


def _started(given: list[Ids]) -> list[Event]:
    return [_report(rank, [Moved(int(State.ACTIVE), names[:SLOTS])], slots=0) for rank, names in enumerate(given)]


def _scheduler(sequences: int) -> Scheduler:
    evening = Evening(page_bytes=1 << 20, rate=1e9)
    return Scheduler(sequences, RANKS, Rules(64, 64, migrate=True, partition=True, evening=evening))


def _arrived(begin: int, end: int, seed: int) -> Arrived:
    random = np.random.default_rng(seed)
    count = end - begin
    return Arrived(np.arange(begin, end), random.integers(1, 2000, count), random.integers(1, 2000, count))


def _idle(slots: int) -> list[Event]:
    return [_report(rank, [], slots=slots) for rank in range(RANKS)]


def _report(rank: int, moves: list[Moved], slots: int, prompt_tokens: int = 0) -> Reported:
    return Reported(
        rank=rank, moves=tuple(moves), free_pages=1_000_000, pool_pages=1_000_000, slots_free=slots, backlog=0,
        steps=64, prompt_tokens=prompt_tokens, generated_tokens=64 * SLOTS, seconds=3.2,
    )


def _timed(scheduler: Scheduler, events: list[Event]) -> tuple[float, float]:
    said: list[list[Instruction]] = []
    seconds = _seconds(lambda: said.extend(scheduler.handle(events)))
    scheduler.check()
    if not any(isinstance(one, Admit | Migrate) for rank in said for one in rank):
        raise SystemExit("a round placed and moved nothing: it would time no decision")
    return seconds


def _seconds(deed: Callable[[], object]) -> tuple[float, float]:
    """Return what `deed` takes: seconds of this thread, and seconds on the wall."""
    wall, thread = time.perf_counter(), time.thread_time()
    deed()
    return time.thread_time() - thread, time.perf_counter() - wall


def main() -> None:
    """Print the table and the JSON line."""
    parser = argparse.ArgumentParser(description="How long does rank 0 decide at a page boundary?")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    quick = parser.parse_args().quick
    figures, limits = decision_time(quick=quick)
    print(f"one round of rank 0, {WAITING} waiting sequences on {RANKS} ranks, ms")
    for name, value in figures.items():
        print(f"{name.removeprefix('decision_').replace('_', ' '):>16} {value:>8.3f}")
    print_line("decision", figures, limits, quick=quick)


if __name__ == "__main__":
    main()
