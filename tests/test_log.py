"""Laws of the log: who may speak, and what a line looks like."""

from __future__ import annotations

import io
import logging
import re

import pytest

from bgmpi.log import configure


@pytest.fixture(autouse=True)
def _logger_as_it_was():
    logger = logging.getLogger("bgmpi")
    before = (logger.level, list(logger.handlers), logger.propagate)
    yield
    logger.setLevel(before[0])
    logger.handlers[:] = before[1]
    logger.propagate = before[2]


def told(rank: int, level: str = "info") -> list[str]:
    stream = io.StringIO()
    configure(rank, "node1", level, stream)
    room = logging.getLogger("bgmpi.room")
    for name in ("debug", "info", "warning", "error"):
        getattr(room, name)("%s of %d", name, 7)
    return stream.getvalue().splitlines()


def test_a_line_is_utc_time_level_rank_and_host():
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO 0/node1 info of 7", told(0)[0])


@pytest.mark.parametrize(("rank", "level", "lines"), [
    (0, "info", 3), (3, "info", 2), (0, "warning", 2), (3, "error", 1), (0, "debug", 4), (3, "debug", 4)])
def test_rank_0_tells_and_others_only_warn(rank, level, lines):
    assert len(told(rank, level)) == lines


def test_no_carriage_return_reaches_the_log_and_further_lines_are_indented():
    stream = io.StringIO()
    configure(0, "n", stream=stream).info("a\rb\r\nc")
    assert "\r" not in stream.getvalue()
    assert [line.startswith("    ") for line in stream.getvalue().splitlines()] == [False, True, True]


def test_configuring_twice_writes_once():
    stream = io.StringIO()
    configure(0, "n", stream=stream)
    configure(0, "n", stream=stream).info("once")
    assert stream.getvalue().count("once") == 1


def test_on_a_terminal_a_line_wipes_the_bar_that_it_writes_over():
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    configure(0, "n", stream=stream).info("a")
    assert stream.getvalue().endswith("a\x1b[K\n")
