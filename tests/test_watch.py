"""Laws of the watch: it speaks beside MPI, to its own job alone, and ends what does not go on."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest

from bgmpi import watch as watching
from bgmpi.lateness import Limits
from bgmpi.pulse import Phase, Pulse
from bgmpi.side_channel import LOOPBACK, TOKEN_BYTES, SideChannel, new_token, own_addresses
from bgmpi.watch import Watch
from bgmpi.world import CODE_FILE

LIMITS = Limits(heartbeat=1.6, startup=60)


def test_only_what_bears_the_token_and_comes_from_the_jobs_hosts_is_heard() -> None:
    token = new_token()
    one, other, foreign = (SideChannel(bears, alone=True) for bears in (token, token, new_token()))
    here = [(LOOPBACK, one.port)]
    foreign.send(b"not of this job", here)
    assert one.receive(1) is None
    other.send(b"hello", here)
    assert one.receive(1) == (b"hello", (LOOPBACK, other.port))
    one.senders.clear()
    other.send(b"from nowhere", here)
    assert one.receive(1) is None
    for channel in (one, other, foreign):
        channel.close()


def test_the_token_cannot_be_guessed_and_addresses_are_this_hosts() -> None:
    assert len(new_token()) == TOKEN_BYTES >= 16 and new_token() != new_token()
    assert own_addresses()[-1] == LOOPBACK and len(set(own_addresses())) == len(own_addresses())


@contextmanager
def ranks(*pulses: Pulse, limits: Limits = LIMITS) -> Iterator[list[list[int]]]:
    """Let a watch of each pulse run; -> by rank, the codes with which it would have left."""
    token = new_token()
    channels = [SideChannel(token, alone=True) for _ in pulses]
    left: list[list[int]] = [[] for _ in pulses]
    watches = [
        Watch(rank, f"n{rank}", len(pulses), pulse, limits, channels[rank], [(LOOPBACK, channels[0].port)],
              leave=left[rank].append)
        for rank, pulse in enumerate(pulses)
    ]  # fmt: skip
    threads = [Thread(target=one.run) for one in watches]
    for thread in threads:
        thread.start()
    try:
        yield left
    finally:
        for one, channel in zip(watches, channels, strict=True):
            one.closed = True
            channel.wake()
        for thread, channel in zip(threads, channels, strict=True):
            thread.join()
            channel.close()


def until(true: Callable[[], bool], seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.02)
    return true()


def at(phase: Phase, *, waits: bool = False) -> Pulse:
    pulse = Pulse()
    pulse.enter(phase)
    pulse.begun, pulse.waits = True, waits
    return pulse


def test_all_leave_and_the_rank_that_they_wait_for_is_named_with_its_stacks(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(watching, "_GRACE", 0.2)
    monkeypatch.setenv(CODE_FILE, str(tmp_path / "code"))
    with ranks(at(Phase.ORDERS, waits=True), at(Phase.STEP), at(Phase.ORDERS, waits=True)) as left:
        assert until(lambda: all(left))
    assert left == [[75]] * 3 and (tmp_path / "code").read_text() == "75"
    warned, ended = [one for one in caplog.records if one.name == "bgmpi.watch"]
    assert warned.levelno == logging.WARNING and ended.levelno == logging.ERROR
    for record in (warned, ended):
        assert record.getMessage().startswith("rank 1/n1 has not gone on for 1.") and "'a step'" in record.getMessage()
        assert "rank 0" not in record.getMessage() and "--heartbeat" in record.getMessage()
    stacks = capsys.readouterr().err.splitlines()
    assert stacks and all(line.startswith("rank 1/n1: ") for line in stacks)
    assert any("in until" in line for line in stacks) and not any("bgmpi/watch.py" in line for line in stacks)


def test_ranks_that_go_on_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    slow, waiting = at(Phase.STEP), at(Phase.ORDERS, waits=True)
    with ranks(waiting, slow) as left:
        for _ in range(4):
            time.sleep(0.7)
            slow.beat()
    assert left == [[], []] and not [one for one in caplog.records if one.name == "bgmpi.watch"]


def test_a_silent_rank_0_is_ended_by_one_of_those_that_wait_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watching, "_GRACE", 0.1)
    pulses = [at(Phase.PUBLISHING), at(Phase.PUBLISHING, waits=True), at(Phase.PUBLISHING, waits=True)]
    with ranks(*pulses, limits=Limits(1.6, 60)) as left:
        quiet = time.monotonic()
        monkeypatch.setattr(Watch, "look", _mute(Watch.look, lambda: time.monotonic() > quiet + 0.5))
        assert until(lambda: bool(left[1]))
        assert not left[2], "one tells for all"
    last = caplog.records[-1].getMessage()
    assert "rank 0/n0 has not answered for" in last and "'publishing'" in last


def _mute(look: Callable[[Watch], None], when: Callable[[], bool]) -> Callable[[Watch], None]:
    """Return a look that rank 0 leaves out from some moment on."""
    return lambda one: None if one.rank == 0 and when() else look(one)


def test_who_is_never_heard_is_told_once_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watching, "_JOINING", 0.3)
    token = new_token()
    channel = SideChannel(token, alone=True)
    left: list[int] = []
    lonely = Watch(0, "n0", 3, at(Phase.ORDERS, waits=True), Limits(0.5, 60), channel, leave=left.append)
    thread = Thread(target=lonely.run)
    thread.start()
    time.sleep(1.5)
    lonely.closed = True
    channel.wake()
    thread.join()
    channel.close()
    assert not left
    (said,) = [one.getMessage() for one in caplog.records if one.name == "bgmpi.watch"]
    assert "2 of 3 ranks (1, 2)" in said


def test_a_rank_that_hears_nobody_watches_itself(caplog: pytest.LogCaptureFixture) -> None:
    left: list[int] = []
    for rank, waits in ((1, False), (2, True)):
        alone = Watch(rank, f"n{rank}", 4, at(Phase.STEP, waits=waits), Limits(0.5, 60), leave=left.append)
        thread = Thread(target=alone.run, daemon=True)
        thread.start()
    assert until(lambda: bool(left))
    time.sleep(0.5)
    alone.closed = True
    thread.join()
    assert left == [75]
    (said,) = [one.getMessage() for one in caplog.records if one.name == "bgmpi.watch"]
    assert said.startswith("rank 1/n1 has not gone on")


def test_where_there_is_no_socket_the_job_goes_on_unwatched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(*_: object, **__: object) -> SideChannel:
        raise OSError("no sockets left")

    monkeypatch.setattr(watching, "SideChannel", none)
    assert watching._channel(new_token(), alone=True) is None
    assert "no sockets left" in caplog.text


_ALONE = """
import sys, threading
from bgmpi.lateness import Limits
from bgmpi.pulse import Pulse
from bgmpi.watch import Watch
watch = Watch(0, "n0", 1, Pulse(), Limits(2, 2))
threading.Timer(0.7, lambda: print("watched", flush=True)).start()
watch.run()
"""


def test_time_in_which_a_process_is_stopped_does_not_count() -> None:
    process = subprocess.Popen([sys.executable, "-c", _ALONE], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
    began = time.monotonic()
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(2.5)
    os.kill(process.pid, signal.SIGCONT)
    process.communicate(timeout=30)
    assert process.returncode == 75
    assert time.monotonic() - began > 2.5 + 1
