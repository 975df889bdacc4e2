"""A signal is noted, once, and raises only while nothing could be lost."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

import pytest

from bgmpi.errors import ExitCode, StoppedError
from bgmpi.stop_request import SIGNALS, StopRequest, stop_on_signals


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_noted_and_harms_nothing(number: signal.Signals) -> None:
    with stop_on_signals() as request:
        assert not request.reason
        for _ in range(3):
            os.kill(os.getpid(), number)
        assert request.reason == number.name


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with stop_on_signals():
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_process_that_ends_ignores_what_comes_late() -> None:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        with stop_on_signals(ends=True):
            pass
        for number in SIGNALS:
            os.kill(os.getpid(), number)
            assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_while_loading_the_first_signal_raises_and_the_second_does_not() -> None:
    told = pytest.raises(StoppedError, match="SIGUSR1 came before the first step")
    with stop_on_signals() as request, told as error, request.loading(), request.stage():
        try:
            os.kill(os.getpid(), signal.SIGUSR1)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # while the first is on its way out
        raise AssertionError("nothing was raised")
    assert error.value.exit_code == ExitCode.STOPPED


def test_a_signal_before_loading_raises_when_loading_begins() -> None:
    request = StopRequest()
    request.ask(signal.SIGTERM)
    with pytest.raises(StoppedError), request.loading(), request.stage():
        raise AssertionError("the block was entered")


def test_a_request_whose_exception_was_lost_raises_at_the_end() -> None:
    request = StopRequest()
    with pytest.raises(StoppedError), request.loading(), request.stage(), contextlib.suppress(StoppedError):
        request.ask(signal.SIGTERM)


def test_between_stages_and_after_loading_nothing_is_raised() -> None:
    request = StopRequest()
    with request.loading():
        with request.stage():
            pass
        request.ask(signal.SIGTERM)
    with request.stage():
        request.ask(signal.SIGUSR1)
    assert request.reason == "SIGUSR1"


def test_outside_of_the_main_thread_nothing_is_caught_and_nothing_fails() -> None:
    seen: list[str] = []

    def body() -> None:
        with stop_on_signals() as request:
            seen.append(request.reason)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [""]
