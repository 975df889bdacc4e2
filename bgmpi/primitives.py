"""What rank 0 says and hears: frozen instructions out, frozen events in.

All four primitives of the paper (A3) are here from the first day.  Many sequences travel as arrays in one record,
never as one record a sequence.  Everything is tagged plain data (msgspec structs: typed, no pickle), so a round crosses
ranks and can be written to the trace and replayed.

Sequences are named by number: row r's sample s is `first[r] + s`, dense over the job.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Counts = NDArray[np.int64]

#: Up to so many active sequences a rank tells how far each has come.
FEW_ACTIVE = 16
NOBODY: Ids = np.empty(0, np.int64)
NOBODY.flags.writeable = False

# --- events: what the scheduler is told ---------------------------------------------------------------------------


class Arrived(Struct, frozen=True, tag=True, eq=False):
    """Rows were read and are ready to run.  prompt, cap: tokens int64 [k] (prompt length, most tokens to generate);
    decoded: int64 [k], tokens that an earlier attempt generated, empty where nobody has any; shared: int64 [k], tokens
    of the prompt that another sequence of the same unit computes, empty where nobody shares; unit: int64 [k], equal for
    neighbours that should be on one rank, empty where each stands alone.  A unit arrives whole."""

    sequences: Ids
    prompt: Counts
    cap: Counts
    decoded: Counts = NOBODY
    shared: Counts = NOBODY
    unit: Ids = NOBODY


class InputEnded(Struct, frozen=True, tag=True, eq=False):
    """No further row will arrive."""


class Refused(Struct, frozen=True, tag=True, eq=False):
    """Sequences that never ran: their row is an error row."""

    sequences: Ids


class Restored(Struct, frozen=True, tag=True, eq=False):
    """Sequences that an earlier attempt ended: with an answer, or with an error."""

    done: Ids
    failed: Ids


class StopAsked(Struct, frozen=True, tag=True, eq=False):
    """The job should stop at this boundary, before its end: why, and with which exit code."""

    reason: str
    code: int


class Moved(Struct, frozen=True, eq=False):
    """These sequences went to `state` (a `State`), in this order of happening within a report."""

    state: int
    sequences: Ids


class Deed(Struct, frozen=True, eq=False):
    """Something that a rank did, for the trace: `what` ("run", "yield", "combine", "migrate", "partition", "spill"),
    when it began and how long it took, in seconds of the job's clock; the sequences it was about (none for "run"), and
    the bytes that it moved."""

    what: str
    begun: float
    seconds: float
    sequences: Ids
    bytes: int = 0


class Reported(Struct, frozen=True, tag=True, eq=False):
    """One rank's report at a round's end.

    moves: what became of its sequences since the last report, oldest first.  What rank 0 ordered (Yield, Migrate,
    Partition) it has already noted when it ordered it, and is not reported again; but who receives a moving sequence
    reports it (as YIELDED, or WAITING when it never ran), and so does a source whose sequence could not move.
    free_pages, pool_pages, slots_free, backlog: what the rank has left, for the next placement.
    steps: steps made; prompt_tokens, generated_tokens: tokens computed; wasted_tokens: those computed again because a
    yield had dropped their KV; reused_tokens: prompt tokens whose KV another sequence had computed; seconds: time spent
    in steps.
    thin_steps: steps that computed less than half of the tokens that a step may while sequences waited, full_steps:
    those of them whose KV memory had no room for another sequence.
    active, decoded: the rank's active sequences and how many tokens each has generated, while they are at most
    FEW_ACTIVE (a tail is then near), else empty.
    deeds: what it did, when the job keeps a trace, else empty.
    answered: int64 [k, 2], the caps of the sequences that ended with an answer and the tokens that each generated.
    stop: the signal that asked the rank to stop, else empty.
    """

    rank: int
    moves: tuple[Moved, ...]
    free_pages: int
    pool_pages: int
    slots_free: int
    backlog: int
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    wasted_tokens: int = 0
    reused_tokens: int = 0
    thin_steps: int = 0
    full_steps: int = 0
    seconds: float = 0.0
    active: Ids = NOBODY
    decoded: Counts = NOBODY
    deeds: tuple[Deed, ...] = ()
    answered: Counts = NOBODY
    stop: str = ""


Event = Arrived | InputEnded | Refused | Restored | Reported | StopAsked

# --- instructions: what the scheduler says ------------------------------------------------------------------------


class Admit(Struct, frozen=True, tag=True, eq=False):
    """The rank owns these sequences from now on and starts them, in this order, as room allows."""

    sequences: Ids


class Run(Struct, frozen=True, tag=True, eq=False):
    """Make up to `steps` steps, then report; every rank gets the same number.

    more: rank 0 has sequences that wait for a rank, so a rank that starves should end the round early.
    """

    steps: int
    more: bool = False


class Yield(Struct, frozen=True, tag=True, eq=False):
    """Stop these active sequences of the rank, keep their KV, and hold them until Combine or Migrate names them."""

    sequences: Ids


class Combine(Struct, frozen=True, tag=True, eq=False):
    """Let these held sequences of the rank run again, as room allows."""

    sequences: Ids


class Migrate(Struct, frozen=True, tag=True, eq=False):
    """Move these suspended or waiting sequences, with what KV they have, from rank `source` to rank `target`, where
    they run as room allows; who could not move runs on at the source, which reports it.  Every rank gets every Migrate
    of a round: it is collective over the world."""

    sequences: Ids
    source: int
    target: int


class Partition(Struct, frozen=True, tag=True, eq=False):
    """Run this active sequence of rank `leader` over the ranks [first, first + size) (the leader is one of them), until
    it ends or another Partition names it; size 1 (first = leader) ends its being sharded.

    Every rank gets every Partition of a round: it is collective over the world.
    """

    sequence: int
    leader: int
    first: int
    size: int


class Stop(Struct, frozen=True, tag=True, eq=False):
    """The job is over for this rank: all ended or, with a reason, it stops before, with exit code `code`."""

    reason: str = ""
    code: int = 0


Instruction = Admit | Run | Yield | Combine | Migrate | Partition | Stop
