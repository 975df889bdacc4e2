"""Sees to it that a stuck rank ends the job, and is named (`--heartbeat`, `--startup-timeout`).

A thread of every rank reads the rank's `Pulse` every few seconds and tells rank 0 over a `SideChannel` what the rank is
doing and for how long it has not gone on; rank 0's thread judges (`lateness`), warns, and at the limit ends all.
Should rank 0 be the one that does not answer, the first of the others that is kept waiting does the same.  Watched is
the progress of main threads; a thread that cannot speak, because its process is stopped or a call holds the
interpreter, is a sign of its own.

How all end: the exit code is noted where the batch script reads it, every rank that can be reached prints the stacks of
the stuck ones and leaves by `os._exit`; a launcher ends the others by SIGKILL as soon as one has left with a code that
is not 0 (srun with --kill-on-bad-exit), also those that are stopped.  MPI's own Abort is not used: it needs the library
that the main thread may hold.  Whatever could block on the way (a full pipe, a dead file system) is waited for briefly.

They leave with "run again" (75): what is stuck is most often the machine, and what had been saved is good.

Time is counted only while the thread runs, so a job that a batch system suspends is not late when it goes on.
A watch that cannot be set up costs a line in the log and never the job.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from threading import Thread

import msgspec

from bgmpi.errors import ExitCode
from bgmpi.lateness import Alarm, Limits, Seen, Stall, judge
from bgmpi.pulse import Phase, Pulse
from bgmpi.side_channel import LOOPBACK, Address, SideChannel, new_token, own_addresses
from bgmpi.world import World, decode, note_exit_code, started

#: Seconds after which rank 0 says whom it cannot hear.
_JOINING = 15.0
#: Seconds that a rank gives others to tell what they do, and a deed that may block.
_GRACE = 1.5
#: Where rank 0 is silent the others act one after the other, so that one tells for all.
_STAGGER, _MOST_STAGGERED = 2.0, 30
#: Most ranks that print stacks.
_DUMPING = 4
_MOST_NAMED = 8
_LOG = logging.getLogger("bgmpi.watch")


class Beat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """What a rank tells of itself (see `Seen`)."""

    rank: int
    host: str
    phase: str
    waits: bool
    begun: bool
    still: float


class End(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """All leave now; `stacks`: who prints its stacks before."""

    stacks: list[int]


_read = msgspec.msgpack.Decoder(Beat | End).decode


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where rank 0's thread is reached, and how the job's datagrams are known: told to all through MPI, once."""

    host: str
    addresses: list[str]
    port: int
    token: bytes


@dataclass(slots=True)
class Watch:
    """One rank's watch.

    channel: None where there is none, and the rank watches itself alone; head: where rank 0 may be reached; leave: what
    ends this process (a test's own may return).
    """

    rank: int
    host: str
    size: int
    pulse: Pulse
    limits: Limits
    channel: SideChannel | None = None
    head: list[Address] = field(default_factory=list)
    leave: Callable[[int], None] = os._exit
    closed: bool = False
    _awake: float = 0.0
    _last: tuple[object, ...] = ()
    _since: float = 0.0
    _heard: dict[int, tuple[Beat, float]] = field(default_factory=dict)
    _where: dict[int, Address] = field(default_factory=dict)
    _alarm: Alarm = field(default_factory=Alarm)
    _told_deaf: bool = False

    def run(self) -> None:
        """Watch until `closed`.  The body of the thread."""
        interval = self.limits.interval
        last = time.monotonic()
        while not self.closed:
            self._listen(last + interval)
            now = time.monotonic()
            # A longer gap means that the process, or at least this thread, could not run: that was nobody's fault.
            self._awake += min(now - last, 2 * interval)
            last = now
            if not self.closed:
                self.look()

    def look(self) -> None:
        """Take this rank's pulse, tell it, judge."""
        own = self._own()
        beat = msgspec.msgpack.encode(Beat(own.rank, own.host, own.phase, own.waits, own.begun, own.still))
        if self.channel is not None:
            self.channel.send(beat, self._where.values() if self.rank == 0 else self.head)
        stall = self._judge(own)
        if stall is None:
            return
        flag, limit = self._limit(stall)
        if stall.seconds >= limit + _STAGGER * min(max(0, self.rank - 1), _MOST_STAGGERED):
            self._end(stall)
        elif self.rank <= 1 and self._alarm.due(stall, self.limits.warning(begun=stall.begun)):
            after = f"; after {limit:g} s the job ends ({flag})" if limit < inf else ""
            _briefly(lambda: _LOG.warning("%s%s", stall.told(), after))

    # --- inside ---------------------------------------------------------------------------------------------------

    def _own(self) -> Seen:
        pulse = self.pulse
        now = (pulse.count, pulse.phase, pulse.waits)
        if now != self._last:
            self._last, self._since = now, self._awake
        return Seen(self.rank, self.host, str(pulse.phase), pulse.waits, pulse.begun, self._awake - self._since)

    def _judge(self, own: Seen) -> Stall | None:
        if self.rank == 0:
            self._tell_deafness()
            return judge([own, *(self._seen(rank) for rank in range(1, self.size))], self.limits.patience)
        head = self._seen(0)
        # Else rank 0 judges, and knows more.
        return judge([head, own], self.limits.patience) if head.silent > self.limits.patience else None

    def _seen(self, rank: int) -> Seen:
        if rank not in self._heard:
            return Seen(rank, "?", Phase.STARTING, False, False, inf, inf)
        beat, then = self._heard[rank]
        silent = self._awake - then
        return Seen(rank, beat.host, beat.phase, beat.waits, beat.begun, beat.still + silent, silent)

    def _listen(self, until: float) -> None:
        while not self.closed and (left := until - time.monotonic()) > 0:
            if self.channel is None:
                time.sleep(min(left, 0.1))
                continue
            letter = self.channel.receive(left)
            if letter is not None:
                self._hear(*letter)

    def _hear(self, data: bytes, sender: Address) -> None:
        try:
            message = _read(data)
        except msgspec.MsgspecError:
            return
        if isinstance(message, End):
            self._follow(message)
        elif 0 <= message.rank < self.size and message.rank != self.rank:
            self._heard[message.rank] = message, self._awake
            self._where[message.rank] = sender
            if message.rank == 0:
                self.head = [sender]  # of several ways to rank 0, the one that answers

    def _tell_deafness(self) -> None:
        if self._told_deaf or self._awake < _JOINING:
            return
        self._told_deaf = True
        deaf = [rank for rank in range(1, self.size) if rank not in self._heard]
        if deaf:
            words = "--heartbeat hears nothing of %d of %d ranks (%s): no datagram gets from them to this host, so "
            words += "each of them watches itself alone"
            _briefly(lambda: _LOG.warning(words, len(deaf), self.size, _some(deaf)))

    def _limit(self, stall: Stall) -> tuple[str, float]:
        return "--heartbeat" if stall.begun else "--startup-timeout", self.limits.end(begun=stall.begun)

    # --- the end --------------------------------------------------------------------------------------------------

    def _end(self, stall: Stall) -> None:
        """Say why, tell all, leave."""
        flag, limit = self._limit(stall)
        _briefly(lambda: note_exit_code(ExitCode.STOPPED))
        last = "%s: the job ends, for the limit is %g s (%s); finished rows are safe, start it again to go on"
        _briefly(lambda: _LOG.error(last, stall.told(), limit, flag))
        order = End([one.rank for one in stall.culprits][:_DUMPING])
        if self.channel is not None:
            for _ in range(3):  # any of them may be lost
                self.channel.send(msgspec.msgpack.encode(order), self._where.values())
        self._follow(order)

    def _follow(self, order: End) -> None:
        """Leave, after the stuck ranks have told where they are."""
        if self.rank in order.stacks:
            _briefly(lambda: _tell_stacks(f"rank {self.rank}/{self.host}: "))
        else:
            time.sleep(_GRACE)
        self.closed = True
        self.leave(int(ExitCode.STOPPED))


@contextmanager
def watched(world: World, limits: Limits) -> Iterator[None]:
    """Collective over the world: watch inside the block; nothing where `limits.heartbeat` is 0."""
    if not limits.heartbeat:
        yield
        return
    watch = _open(world, limits)
    started()
    thread = Thread(target=watch.run, name="watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        watch.closed = True
        if watch.channel is not None:
            watch.channel.wake()
        thread.join(_GRACE)
        if watch.channel is not None and not thread.is_alive():
            watch.channel.close()


def _open(world: World, limits: Limits) -> Watch:
    """Collective over the world: let all know where rank 0's thread is reached."""
    alone = world.node_size == world.size
    watch = Watch(world.rank, world.host, world.size, world.pulse, limits)
    if world.size == 1:
        return watch
    mine = own_addresses()
    meetings: list[Meeting] = []
    if world.rank == 0:
        token = new_token()
        watch.channel = _channel(token, alone=alone)
        if watch.channel is not None:
            meetings.append(Meeting(world.host, mine, watch.channel.port, token))
    everyone = world.gather(mine)
    if everyone is not None and watch.channel is not None:
        watch.channel.senders.update(*(decode(data, list[str]) for data in everyone))
    for meeting in world.broadcast(meetings, list[Meeting]):
        if world.rank:
            watch.channel = _channel(meeting.token, alone=alone)
            near = meeting.host == world.host
            watch.head = [(one, meeting.port) for one in meeting.addresses if near or one != LOOPBACK]
        if watch.channel is not None:
            watch.channel.senders.update(meeting.addresses)
    return watch


def _channel(token: bytes, *, alone: bool) -> SideChannel | None:
    try:
        return SideChannel(token, alone=alone)
    except OSError as error:
        _LOG.warning("--heartbeat: this rank has no socket (%s) and is not watched", error)
        return None


def _some(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:_MOST_NAMED])) + (", ..." if len(ranks) > _MOST_NAMED else "")


def _briefly(deed: Callable[[], None]) -> None:
    """Do what may block for ever, and go on after a moment all the same."""
    thread = Thread(target=deed, daemon=True)
    thread.start()
    thread.join(_GRACE)


def _tell_stacks(prefix: str) -> None:
    """Print the stacks of all threads but the watch's own, each line with the rank's name."""
    file = os.memfd_create("stacks")
    faulthandler.dump_traceback(file, all_threads=True)
    text = os.pread(file, 1 << 20, 0).decode(errors="replace")
    os.close(file)
    threads = [one for one in text.split("\n\n") if f'"{__file__}"' not in one]
    sys.stderr.write("".join(f"{prefix}{line}\n" for one in threads for line in one.splitlines()))
    sys.stderr.flush()
