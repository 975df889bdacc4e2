"""When a job stops by itself: as pure functions of times and counts."""

from __future__ import annotations

import pytest

from bgmpi.errors import ExitCode
from bgmpi.stop_rules import StopRules


@pytest.mark.parametrize(("now", "longest", "stops"), [
    (800.0, 10.0, False), (929.0, 10.0, False), (931.0, 10.0, True), (700.0, 250.0, True), (1200.0, 0.0, True),
])  # fmt: skip
def test_a_round_that_might_end_too_late_is_not_begun(now: float, longest: float, stops: bool) -> None:
    wish = StopRules(wall_end=1000.0, margin=60.0).near_the_end(now, longest)
    assert (wish is not None) == stops
    if wish is not None:
        assert wish.code == ExitCode.STOPPED and "wall time" in wish.reason


def test_without_an_end_or_a_margin_nothing_stops_a_job() -> None:
    assert StopRules(margin=60.0).near_the_end(1e12, 1e9) is None
    assert StopRules(wall_end=0.0, margin=0.0).near_the_end(1e12, 1e9) is None


@pytest.mark.parametrize(("limit", "failed", "rows", "stops"), [
    ("0", 0, 10, False), ("0", 1, 10, True), ("3", 3, 10, False), ("3", 4, 10, True), ("10%", 10, 100, False),
    ("10%", 11, 100, True), ("0.5%", 5, 1000, False), ("0.5%", 6, 1000, True), (None, 10, 10, False),
])  # fmt: skip
def test_more_failed_rows_than_allowed_stop_the_job(limit: str | None, failed: int, rows: int, stops: bool) -> None:
    wish = StopRules(max_errors=limit).too_many_errors(failed, rows, 0)
    assert (wish is not None) == stops


def test_the_code_says_whose_fault_most_of_them_are() -> None:
    rules = StopRules(max_errors="1")
    faulty, malformed = rules.too_many_errors(10, 99, 6), rules.too_many_errors(10, 99, 5)
    assert faulty is not None and faulty.code == ExitCode.INTERNAL and "6 of them" in faulty.reason
    assert malformed is not None and malformed.code == ExitCode.INPUT and "--max-errors 1" in malformed.reason
