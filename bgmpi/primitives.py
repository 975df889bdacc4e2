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

# --- events: what the scheduler is told ---------------------------------------------------------------------------


class Arrived(Struct, frozen=True, tag=True, eq=False):
    """Rows were read and are ready to run.  prompt, cap: tokens int64 [k] (prompt length, most tokens to generate)."""

    sequences: Ids
    prompt: Counts
    cap: Counts


class InputEnded(Struct, frozen=True, tag=True, eq=False):
    """No further row will arrive."""


class Refused(Struct, frozen=True, tag=True, eq=False):
    """Sequences that never ran: their row is an error row."""

    sequences: Ids


class Moved(Struct, frozen=True, eq=False):
    """These sequences went to `state` (a `State`), in this order of happening within a report."""

    state: int
    sequences: Ids


class Reported(Struct, frozen=True, tag=True, eq=False):
    """One rank's report at a round's end.

    moves: what became of its sequences since the last report, oldest first.
    free_pages, pool_pages, slots_free, backlog: what the rank has left, for the next placement.
    steps: steps made; prompt_tokens, generated_tokens: tokens computed; wasted_tokens: those computed again because a
    yield had dropped their KV; seconds: time spent in steps.
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
    seconds: float = 0.0


Event = Arrived | InputEnded | Refused | Reported

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
    """Stop these sequences at the next module boundary and free the device for others."""

    sequences: Ids


class Combine(Struct, frozen=True, tag=True, eq=False):
    """Resume these yielded sequences in one batch."""

    sequences: Ids


class Migrate(Struct, frozen=True, tag=True, eq=False):
    """Move these suspended sequences, with their KV, from `source` to `target` (ranks)."""

    sequences: Ids
    source: int
    target: int


class Partition(Struct, frozen=True, tag=True, eq=False):
    """Run each of these sequences over the rank group `ranks` (int64 [g])."""

    sequences: Ids
    ranks: Ids


class Stop(Struct, frozen=True, tag=True, eq=False):
    """The job is over for this rank."""


Instruction = Admit | Run | Yield | Combine | Migrate | Partition | Stop
