"""Laws of what a job came to: read from the published file, by samples, rows, priorities and deadlines."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
from results_for_tests import answer, error, publish_answers

from bgmpi.io.outcome import ClassTimes, read_outcome
from bgmpi.request import Finish


def test_samples_errors_caps_and_times_of_all_segments_are_counted(tmp_path: Path) -> None:
    output = tmp_path / "out.h5"
    answers = [
        answer(0, 0, queued_s=1.0, done_s=2.0), answer(0, 1, queued_s=1.0, done_s=5.0, finish=Finish.LENGTH),
        error(1, -1), answer(2, first_token_s=7.5, done_s=9.0, default_cap=True),
        error(3, 0, "numeric", default_cap=True, first_token_s=30.0), answer(3, 1, done_s=40.0), error(4, -1),
    ]
    publish_answers(output, answers, [2, 1, 1, 2, 1])
    found = read_outcome(output)
    assert found.finish == {"stop": 3, "length": 1}
    assert found.errors == {"context_length_exceeded": 2, "numeric": 1}
    assert (found.default_capped, found.last_first) == (1, 7.5)
    np.testing.assert_allclose(found.sct, np.percentile([1.0, 4.0, 9.0, 40.0], [50, 95, 99]))
    assert found.shown == [(0, "text of row 0 sample 0"), (2, "text of row 2 sample 0")]
    assert (found.classes, found.more_classes, found.in_time, found.late) == ([], 0, 0, 0)


def test_a_row_is_answered_with_its_last_sample_and_never_with_an_error(tmp_path: Path) -> None:
    output = tmp_path / "out.h5"
    answers = [answer(0, 0, done_s=1.0), answer(0, 1, done_s=3.0), answer(1, done_s=2.0), answer(2, 0, done_s=1.0),
               replace(error(2, 1), done_s=2.0), error(3, -1), answer(4, done_s=4.0)]
    publish_answers(output, answers, [2, 1, 2, 1, 1])
    deadline = np.array([2.5, 2.5, 99, 99, np.inf], np.float32)
    found = read_outcome(output, np.array([0, 0, -7, -7, 0], np.int32), deadline)
    assert (found.in_time, found.late) == (1, 3)
    first, second = found.classes
    assert (first.priority, first.rows, math.isnan(first.p50)) == (-7, 2, True)
    np.testing.assert_allclose([second.p50, second.p95, second.p99], np.percentile([3.0, 2.0, 4.0], [50, 95, 99]))
    assert found.more_classes == 0


def test_of_many_priorities_the_most_urgent_are_told_and_the_others_counted(tmp_path: Path) -> None:
    output = tmp_path / "out.h5"
    publish_answers(output, [answer(row, done_s=float(row)) for row in range(20)], [1] * 20)
    found = read_outcome(output, np.arange(20, 0, -1).astype(np.int32))
    assert found.classes[:2] == [ClassTimes(1, 1, 19.0, 19.0, 19.0), ClassTimes(2, 1, 18.0, 18.0, 18.0)]
    assert (len(found.classes), found.more_classes) == (8, 12)


def test_a_job_of_no_rows_has_no_times(tmp_path: Path) -> None:
    output = tmp_path / "out.h5"
    publish_answers(output, [], [])
    found = read_outcome(output, np.empty(0, np.int32), np.empty(0, np.float32))
    assert math.isnan(found.sct[0]) and math.isnan(found.last_first) and not found.classes
