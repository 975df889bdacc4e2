"""Laws of the timeline: sums are exact, idle is the rest, and a picture's pieces are few however long the trace."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bgmpi.coroutine import State
from bgmpi.errors import InputError, MissingError
from bgmpi.primitives import NOBODY, Arrived, Deed, Moved, Reported, Run
from bgmpi.timeline import MOST_COLUMNS, bytes_text, read_timeline, seconds_text, summary, table
from bgmpi.trace import TraceWriter


def ids(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int64)


def trace(path, *reports: dict[int, list[Deed]], ranks: int = 2, events=()):
    """Write a trace: one round a report, a report being each rank's deeds."""
    with TraceWriter(path) as writer:
        for number, report in enumerate(reports):
            told = [Reported(rank, (), 0, 0, 0, 0, deeds=tuple(deeds)) for rank, deeds in report.items()]
            writer.round(number, float(number), [*events, *told], [[Run(1)]] * ranks)
    return path


def test_sums_are_told_by_rank_and_kind(tmp_path):
    path = trace(tmp_path / "t", {0: [Deed("run", 1.0, 2.0, NOBODY), Deed("yield", 3.0, 0.5, ids(3), 500)]},
                 {0: [Deed("yield", 4.0, 0.25, ids(2), 100)], 1: [Deed("run", 2.0, 3.0, NOBODY)]})
    timeline = read_timeline(path)
    yields = timeline.lanes[0].sums["yield"]
    assert (yields.busy, yields.deeds, yields.sequences, yields.bytes) == (0.75, 2, 5, 600)
    assert (timeline.begin, timeline.end, timeline.seconds) == (1.0, 5.0, 4.0)
    assert [timeline.idle(lane) for lane in timeline.lanes] == [4.0 - 2.75, 1.0]
    assert table(timeline) == [
        ["rank", "idle", "run", "yield"],
        ["0", "1.25 s (31%)", "2 s in 1", "750 ms in 2, 600 B"],
        ["1", "1 s (25%)", "3 s in 1", "-"],
        ["all", "2.25 s (28%)", "5 s in 2", "750 ms in 2, 600 B"],
    ]


def test_a_deed_inside_another_does_not_make_a_rank_busier(tmp_path):
    deeds = [Deed("run", 0.0, 4.0, NOBODY), Deed("spill", 1.0, 1.0, ids(1)), Deed("spill", 3.5, 1.0, ids(1)),
             Deed("run", 9.0, 1.0, NOBODY)]
    timeline = read_timeline(trace(tmp_path / "t", {0: deeds}))
    assert timeline.lanes[0].covered == 5.5 and timeline.idle(timeline.lanes[0]) == 4.5


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 50), st.sampled_from(["run", "yield"])), max_size=30))
def test_idle_is_exactly_what_no_deed_covers(tmp_path_factory, deeds):
    told = [Deed(kind, float(begun), float(long), NOBODY) for begun, long, kind in deeds]
    timeline = read_timeline(trace(tmp_path_factory.mktemp("t") / "t", {0: told}))
    ticks = np.zeros(260, bool)
    for begun, long, _ in deeds:
        ticks[begun : begun + long] = True
    assert timeline.lanes[0].covered == ticks.sum()
    assert timeline.idle(timeline.lanes[0]) == timeline.seconds - ticks.sum()


def test_every_rank_of_the_job_has_a_lane_also_one_that_did_nothing(tmp_path):
    timeline = read_timeline(trace(tmp_path / "t", {1: [Deed("run", 0.0, 1.0, NOBODY)]}, ranks=4))
    assert len(timeline.lanes) == 4 and not timeline.lanes[3].sums
    assert timeline.idle(timeline.lanes[3]) == 1.0


def test_what_became_of_sequences_is_counted_and_is_no_piece(tmp_path):
    moved = Reported(0, (Moved(State.ACTIVE, ids(3)), Moved(State.DONE, ids(2))), 0, 0, 0, 0)
    path = trace(tmp_path / "t", {}, {}, events=(Arrived(ids(3), ids(3), ids(3)), moved))
    timeline = read_timeline(path)
    assert timeline.events == {"arrived": 6, "active": 6, "done": 4}
    assert not any(lane.pieces for lane in timeline.lanes)
    assert "6 arrived, 6 active, 4 done" in summary(timeline)


def test_neighbours_that_fit_into_one_column_are_one_piece_and_others_are_not(tmp_path):
    short = [Deed("yield", 100.0 + i / 1000, 0.0001, ids(1), 10) for i in range(50)]
    long = [Deed("run", 200.0 * i, 199.99, NOBODY) for i in range(5)]
    lane = read_timeline(trace(tmp_path / "t", {0: [*short, *long]})).lanes[0]
    (piece,) = lane.pieces["yield"]
    assert (piece.deeds, piece.sequences, piece.bytes) == (50, 50, 500) and piece.busy == pytest.approx(0.005)
    assert len(lane.pieces["run"]) == 5


def test_a_long_trace_makes_few_pieces_and_keeps_its_sums(tmp_path):
    draw = np.random.default_rng(0)
    reports, at = [], 0.0
    for _ in range(200):
        deeds = []
        for _ in range(100):
            at += draw.exponential(0.01)
            deeds.append(Deed("run", at, float(draw.exponential(0.005)), NOBODY))
        reports.append({0: deeds})
    lane = read_timeline(trace(tmp_path / "t", *reports)).lanes[0]
    assert sum(piece.deeds for piece in lane.pieces["run"]) == lane.sums["run"].deeds == 20_000
    assert len(lane.pieces["run"]) <= 2 * MOST_COLUMNS
    assert sum(piece.busy for piece in lane.pieces["run"]) == pytest.approx(lane.sums["run"].busy)


def test_of_many_ranks_the_first_and_all_together_are_told(tmp_path):
    ranks = 100
    path = trace(tmp_path / "t", {rank: [Deed("run", 0.0, 1.0, NOBODY)] for rank in range(ranks)}, ranks=ranks)
    text = summary(read_timeline(path)).splitlines()
    assert len(text) < 40 and text[0].startswith("t: 100 ranks") and "100 s in 100" in text[-1]


def test_a_kind_that_is_not_known_is_told_too(tmp_path):
    timeline = read_timeline(trace(tmp_path / "t", {0: [Deed("think", 0.0, 1.0, NOBODY, 5)]}))
    assert timeline.kinds == ["run", "think"] and "1 s in 1, 5 B" in summary(timeline)


def test_a_trace_without_deeds_has_a_summary(tmp_path):
    TraceWriter(tmp_path / "t").close()
    assert summary(read_timeline(tmp_path / "t")).startswith("t: 0 ranks, 0.000 s to 0.000 s")
    assert read_timeline(trace(tmp_path / "u", {0: []})).seconds == 0


def test_what_is_no_trace_or_not_there_is_told(tmp_path):
    (tmp_path / "t").write_text("hello\n")
    with pytest.raises(InputError, match="expected a trace"):
        read_timeline(tmp_path / "t")
    with pytest.raises(MissingError, match="none"):
        read_timeline(tmp_path / "none")


def test_numbers_are_spelled_shortly():
    durations = (0.0, 12.346, 1.0, 0.0123, 4.2e-6)
    assert [seconds_text(one) for one in durations] == ["0 s", "12.35 s", "1 s", "12.3 ms", "4.2 us"]
    sizes = (0, 999, 4096, 5_000_000, 7_250_000_000)
    assert [bytes_text(one) for one in sizes] == ["0 B", "999 B", "4.1 kB", "5 MB", "7.25 GB"]
