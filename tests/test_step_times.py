"""Laws of step times: measured counts before predicted, and what says nothing is left out."""

from __future__ import annotations

import numpy as np
import pytest

from bgmpi.primitives import Reported
from bgmpi.step_times import StepTimes


def report(count: int, seconds: float, rank: int = 0, **facts: int) -> Reported:
    return Reported(rank, (), 9, 9, 9, 0, steps=10, generated_tokens=10 * count, seconds=10 * seconds, **facts)


def noted(*reports: Reported, sizes: tuple[int, ...] = (1, 1), lockstep: bool = False) -> StepTimes:
    times = StepTimes({2: 0.61, 4: 0.42}, lockstep)
    for one in reports:
        times.note([one], np.array(sizes))
    return times


def test_nothing_is_known_before_a_decode_step_was_measured() -> None:
    times = noted(report(4, 0.1, prompt_tokens=5), report(4, 0.1, wasted_tokens=1))
    assert times.alone(4) is None and times.over(2) is None and times.seconds_a_token == 0.0


def test_the_newest_round_counts_half() -> None:
    times = noted(report(4, 0.1), report(4, 0.2))
    assert times.alone(4) == pytest.approx(0.15)
    assert times.seconds_a_token == pytest.approx(0.15 / 4)


def test_between_and_beyond_what_was_measured_lies_a_line_that_never_falls() -> None:
    times = noted(report(2, 0.02), report(4, 0.03))
    assert [times.alone(n) for n in (2, 3, 4, 6)] == pytest.approx([0.02, 0.025, 0.03, 0.04])
    assert noted(report(2, 0.03), report(4, 0.02)).alone(6) == pytest.approx(0.03)
    assert noted(report(4, 0.02)).alone(1) == pytest.approx(0.0125)


def test_a_group_is_predicted_from_a_lone_step_until_it_has_run_twice() -> None:
    times = noted(report(1, 0.1))
    assert times.over(2) == pytest.approx(0.061) and times.over(4) == pytest.approx(0.042)
    assert times.over(8) is None and times.measured(2) is None
    times.note([report(1, 9.0)], np.array([2, 0]))
    assert times.over(2) == pytest.approx(0.061)
    times.note([report(1, 0.05)], np.array([2, 0]))
    assert times.over(2) == pytest.approx(0.05) == times.measured(2) and times.alone(1) == pytest.approx(0.1)
    assert times.predicted(2) == pytest.approx(0.061)


def test_who_only_follows_in_a_group_says_nothing() -> None:
    assert noted(report(1, 0.1, rank=1), sizes=(2, 0)).alone(1) is None


def test_in_lockstep_only_the_fullest_rank_counts() -> None:
    times = StepTimes({}, lockstep=True)
    times.note([report(1, 0.4), report(8, 0.4, rank=1)], np.array([1, 1]))
    assert times.alone(8) == pytest.approx(0.4) and times.alone(1) == pytest.approx(0.4 * (0.5 + 0.5 / 8))
