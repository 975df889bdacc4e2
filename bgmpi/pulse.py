"""What a rank's main thread says of itself: what it is doing, whether it waits for others, and that it goes on.

A rank is alive as long as its process is; whether it goes on is another question, and only the main thread can answer
it.  So it leaves a trace where it passes: a phase, a count that grows with every piece of work, and a mark while it is
inside a collective.  These are plain stores into one object that comes with the `World`; who reads them (`watch`, from
another thread) reads at any time and needs no lock, because a torn reading is put right by the next one.

It refuses to know the time: reading a clock at every layer would cost more than all the rest.  Rejected: an age of the
process, a signal, or its CPU time, all of which look well in a rank that waits for ever in a spinning MPI call.
"""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """What a rank is doing, in words for the log."""

    STARTING = "starting"
    READING = "reading the input and the model's files"
    RESUMING = "reading what earlier attempts left"
    LOADING = "loading weights"
    LAYING_OUT = "laying out memory"
    TOKENISING = "reading and tokenising the prompts"
    REHEARSING = "rehearsing groups of ranks"
    DECIDING = "deciding a round"
    ORDERS = "waiting for rank 0's orders"
    MOVING = "moving sequences"
    STEP = "a step"
    WRITING = "writing a segment"
    PUBLISHING = "publishing"
    ENDING = "ending"


class Waiting:
    """A block in which the rank waits for other ranks: `with pulse.waiting:`."""

    __slots__ = ("_pulse",)

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse

    def __enter__(self) -> None:
        self._pulse.waits = True

    def __exit__(self, *_: object) -> None:
        self._pulse.waits = False
        self._pulse.count += 1


class Pulse:
    """A rank's trace.  phase; waits: inside a collective; count: grows while it goes on; begun: a step was made."""

    __slots__ = ("begun", "count", "phase", "waiting", "waits")

    def __init__(self) -> None:
        self.phase = Phase.STARTING
        self.count = 0
        self.waits = self.begun = False
        self.waiting = Waiting(self)

    def enter(self, phase: Phase) -> None:
        """Say what comes now."""
        self.phase = phase
        self.count += 1

    def beat(self) -> None:
        """Say that a piece of it is done."""
        self.count += 1

    def stepped(self) -> None:
        """Say that a step is done: the job has begun."""
        self.begun = True
        self.count += 1
