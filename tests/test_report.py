"""Laws of the report: numbers become words, and a bar is drawn on terminals only."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest

from bgmpi.io.outcome import ClassTimes, Outcome
from bgmpi.report import ERASE_LINE, Progress, Snapshot, Summary, bar, clock, line, metrics_line, summary_text

NOW = Snapshot(done=30, failed=2, total=128, active=64, waiting=32, prompt_tokens=6000, generated_tokens=1200,
               kv_used=25, kv_pages=100, preemptions=1, seconds=16.0, steps=40)
BEFORE = replace(NOW, done=10, prompt_tokens=5000, generated_tokens=200, seconds=6.0)
EMPTY = Snapshot(0, 0, None, 0, 0, 0, 0, 0, 0, 0, 0.0, 0)
OUTCOME = Outcome({"length": 9, "stop": 30}, {"context_length_exceeded": 1}, 3, (1.0, 2.0, 3.0), 9.5)
SUMMARY = Summary(
    rows=40, done=39, failed=1, prompt_tokens=1000, generated_tokens=3000, seconds=12.0, load_seconds=2.0, ranks=2,
    steps=77, outcome=OUTCOME, expert_tokens_mean=100.0, expert_tokens_max=150.0,
    outputs={"results": "out/results.h5"}, samples=[("Who are you?", "A  model.\n\x1b[31mI answer.")],
)


def test_the_line_tells_rows_rates_memory_and_time_left():
    assert line(NOW) == (
        "32/128 rows, 2 failed, 64 active, 32 waiting | prompt 375 tok/s, output 75 tok/s | KV 25%, 1 preempted | "
        "0:16 elapsed, ETA 0:48")


def test_rates_are_those_since_the_line_before():
    assert "prompt 100 tok/s, output 100 tok/s" in line(NOW, BEFORE)


@pytest.mark.parametrize("now", [EMPTY, replace(EMPTY, total=0), replace(NOW, seconds=0.0), replace(NOW, total=None),
                                 replace(NOW, done=0, failed=0), replace(NOW, done=126)])
def test_no_number_that_is_missing_or_zero_breaks_a_line(now):
    for text in (line(now), line(now, now), bar(now), metrics_line(now)):
        assert "\n" not in text and "nan" not in text.lower()
    assert json.loads(metrics_line(now))["done"] == now.done


def test_what_cannot_be_known_is_not_guessed():
    assert "32/? rows" in line(replace(NOW, total=None)) and "ETA --:--" in line(replace(NOW, total=None))
    assert json.loads(metrics_line(replace(NOW, total=None)))["eta_seconds"] is None


def test_the_bar_fills_with_the_rows_and_fits_the_terminal():
    assert bar(replace(NOW, done=126)).startswith("[" + "#" * 20 + "]")
    assert bar(NOW).startswith("[" + "#" * 5 + "." * 15 + "]")
    assert len(bar(NOW, columns=60)) < 60


def test_a_duration_reads_like_a_clock():
    assert [clock(s) for s in (0, 7.9, 750, 3723, float("inf"), float("nan"))] == [
        "0:00", "0:07", "12:30", "1:02:03", "--:--", "--:--"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn(mode: str, stream: io.StringIO) -> list[str]:
    said: list[str] = []
    progress = Progress(mode, 10.0, stream, said.append)
    for second in range(25):
        progress.show(replace(NOW, seconds=float(second)))
    progress.show(replace(NOW, seconds=25.0), last=True)
    progress.close()
    return said


def test_in_a_log_there_is_one_line_an_interval_and_nothing_else():
    stream = io.StringIO()
    assert len(drawn("auto", stream)) == 3
    assert stream.getvalue() == ""


def test_on_a_terminal_the_bar_redraws_in_place_and_ends_in_one_newline():
    stream = Terminal()
    assert drawn("auto", stream) == []
    assert stream.getvalue().count(ERASE_LINE) == 26
    assert stream.getvalue().count("\n") == 1 and stream.getvalue().endswith("\n")


def test_a_bar_is_not_redrawn_faster_than_an_eye_sees():
    stream = Terminal()
    progress = Progress("bar", 10.0, stream, print)
    for step in range(100):
        progress.show(replace(NOW, seconds=step / 1000))
    assert stream.getvalue().count(ERASE_LINE) == 1


def test_off_is_silent_but_metrics_go_on():
    stream, metrics = Terminal(), io.StringIO()
    progress = Progress("off", 10.0, stream, print, metrics=metrics)
    for second in range(21):
        progress.show(replace(NOW, seconds=float(second)))
    assert stream.getvalue() == ""
    assert [json.loads(one)["seconds"] for one in metrics.getvalue().splitlines()] == [10.0, 20.0]


def test_the_summary_tells_counts_rates_load_and_paths():
    text = summary_text(SUMMARY)
    for words in ("40: 39 good, 1 failed", "30 stop, 9 length", "1 context_length_exceeded", "3 samples ended at",
                  "first token 9.5 s after",
                  "400 tok/s", "300 generated (150 a rank)", "1.50 times", "out/results.h5", "2 ranks", "2.0 s (95 %)"):
        assert words in text


def test_priorities_and_deadlines_are_told_where_rows_had_them():
    classes = [ClassTimes(-5, 10, 1.0, 2.0, 3.0), ClassTimes(0, 1030, float("nan"), float("nan"), float("nan"))]
    urgent = replace(OUTCOME, classes=classes, more_classes=3, in_time=1200, late=1)
    told = summary_text(replace(SUMMARY, outcome=urgent))
    for words in ("priority -5  10 rows, answered 1.0 s (half)", "priority 0   1,030 rows\n", "3 less urgent ones",
                  "1,200 rows in time, 1 late"):
        assert words in told
    assert "priority" not in summary_text(SUMMARY) and "deadline" not in summary_text(SUMMARY)


@pytest.mark.parametrize(("moves", "told"), [
    ({"migrated": 1200, "moved_bytes": 45_600_000}, "1,200 migrated (45.6 MB copied)"),
    ({"migrated": 2}, "2 migrated (0.0 MB copied)"),
    ({"partitioned": 3}, "3 partitioned"),
    ({"spilled_bytes": 2_000_000_000}, "2,000.0 MB spilled to disk"),
    ({"migrated": 1, "moved_bytes": 100_000, "partitioned": 1, "spilled_bytes": 100_000},
     "1 migrated (0.1 MB copied), 1 partitioned, 0.1 MB spilled to disk"),
])
def test_what_moved_between_ranks_and_tiers_is_told_in_one_line(moves, told):
    (said,) = [one for one in summary_text(replace(SUMMARY, **moves)).splitlines() if one.startswith("moves")]
    assert said.removeprefix("moves").strip() == told


def test_where_nothing_moved_nothing_is_said_of_it():
    assert "\nmoves" not in summary_text(SUMMARY)


def test_samples_are_short_wrapped_and_cannot_move_the_cursor():
    long = replace(SUMMARY, samples=[("word " * 500, "\x1b[31m" + "answer " * 500), ("", "")])
    text = summary_text(long, width=60)
    assert "\x1b" not in text and "> (nothing)" in text
    shown = text.split("\n\n")[0].splitlines()
    assert len(shown) == 6 and max(map(len, shown)) <= 60 and shown[1].endswith(" ...")


def test_a_job_of_no_rows_has_a_summary_without_empty_lines():
    text = summary_text(Summary(rows=0, done=0, failed=0, prompt_tokens=0, generated_tokens=0, seconds=0.0, ranks=1,
                                steps=0))
    assert "0: 0 good, 0 failed" in text and "1 rank" in text and "nan" not in text
    assert all(text.splitlines())
