"""What rank 0 says and hears: frozen instructions out, frozen events in.

All four primitives of the paper (A3) are here from the first day.  Many sequences travel as arrays in one record,
never as one record a sequence.  Everything is plain data, so a round can be written to the trace and replayed.

Sequences are named by number: row r's sample s is `first[r] + s`, dense over the job.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Counts = NDArray[np.int64]

# --- events: what the scheduler is told ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrived:
    """Rows were read and are ready to run.  prompt, cap: tokens int64 [k] (prompt length, most tokens to generate)."""

    sequences: Ids
    prompt: Counts
    cap: Counts


@dataclass(frozen=True, slots=True)
class InputEnded:
    """No further row will arrive."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Sequences that never ran: their row is an error row."""

    sequences: Ids


@dataclass(frozen=True, slots=True)
class Reported:
    """One rank's report at a round's end.

    started, finished, failed, yielded: what changed since the last report, each sequence at most once a list.
    free_pages, pool_pages, slots_free, backlog: what the rank has left, for the next placement.
    steps: steps made; tokens: tokens computed (prompt, generated); seconds: time spent in steps.
    """

    rank: int
    started: Ids
    finished: Ids
    failed: Ids
    yielded: Ids
    free_pages: int
    pool_pages: int
    slots_free: int
    backlog: int
    steps: int
    prompt_tokens: int
    generated_tokens: int
    seconds: float


Event = Arrived | InputEnded | Refused | Reported

# --- instructions: what the scheduler says ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Admit:
    """The rank owns these sequences from now on and starts them, in this order, as room allows."""

    sequences: Ids


@dataclass(frozen=True, slots=True)
class Run:
    """Make up to `steps` steps, then report.  Where ranks walk in lockstep all get the same number."""

    steps: int


@dataclass(frozen=True, slots=True)
class Yield:
    """Stop these sequences at the next module boundary and free the device for others."""

    sequences: Ids


@dataclass(frozen=True, slots=True)
class Combine:
    """Resume these yielded sequences in one batch."""

    sequences: Ids


@dataclass(frozen=True, slots=True)
class Migrate:
    """Move these suspended sequences, with their KV, from `source` to `target` (ranks)."""

    sequences: Ids
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Partition:
    """Run each of these sequences over the rank group `ranks` (int64 [g])."""

    sequences: Ids
    ranks: Ids


@dataclass(frozen=True, slots=True)
class Stop:
    """The job is over for this rank."""


Instruction = Admit | Run | Yield | Combine | Migrate | Partition | Stop
