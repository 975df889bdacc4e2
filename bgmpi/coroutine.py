"""The sequence coroutine: its states, the one table of legal moves, and the story of what happened to it.

A coroutine is data, never a Python frame, because it must cross processes (paper section A2; rejected alternative: a
generator per sequence).  Waiting sequences are rows of arrays, so a million of them cost a few megabytes.

Prefill or decode is not a state: a sequence whose tokens with KV are fewer than its known tokens computes the missing
ones, whether they came from the prompt or were generated before a yield dropped their KV.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from bgmpi.errors import InternalError


class State(IntEnum):
    """Where a sequence stands; each has two sentences in docs/architecture.md."""

    WAITING = 0
    ACTIVE = 1
    YIELDED = 2
    MOVING = 3
    SHARDED = 4
    DONE = 5
    FAILED = 6


class Module(IntEnum):
    """Module boundaries at which a coroutine can stand (option B of the paper: attention | experts)."""

    ATTENTION = 0
    EXPERTS = 1
    HEAD = 2


_MOVES: dict[State, tuple[State, ...]] = {
    State.WAITING: (State.ACTIVE, State.MOVING, State.FAILED),
    State.ACTIVE: (State.YIELDED, State.SHARDED, State.DONE, State.FAILED),
    State.YIELDED: (State.ACTIVE, State.WAITING, State.MOVING, State.SHARDED, State.FAILED),
    State.MOVING: (State.YIELDED, State.WAITING, State.FAILED),
    State.SHARDED: (State.YIELDED, State.DONE, State.FAILED),
    State.DONE: (),
    State.FAILED: (),
}


def legal_moves() -> NDArray[np.bool_]:
    """Return the table of legal moves, bool [from, to]."""
    table = np.zeros((len(State), len(State)), dtype=bool)
    for source, targets in _MOVES.items():
        table[source, list(targets)] = True
    return table


class IllegalMove(InternalError):
    """A coroutine was asked to make a move that the table does not hold; the message tells its story."""


class StateTable:
    """State and owner of every sequence, with a bounded story.

    state: int8 [sequences]; owner: int32 [sequences], the rank that holds it, -1 for nobody.  The last
    `story_moves` moves are kept in a ring, so `story` can say how a sequence came to where it is.
    """

    def __init__(self, sequences: int, story_moves: int = 4096) -> None:
        self.state: NDArray[np.int8] = np.full(sequences, State.WAITING, np.int8)
        self.owner: NDArray[np.int32] = np.full(sequences, -1, np.int32)
        self.counts: NDArray[np.int64] = np.zeros(len(State), np.int64)
        self.counts[State.WAITING] = sequences
        self._legal = legal_moves()
        self._story: NDArray[np.int64] = np.full((story_moves, 4), -1, np.int64)
        self._told = 0

    def __len__(self) -> int:
        return len(self.state)

    def move(
        self, sequences: NDArray[np.int64], target: State | NDArray[np.int64], *, round_number: int = 0
    ) -> None:
        """Move `sequences` int64 [k] (each at most once) to `target`, one state for all or int64 [k], one for each;
        raise IllegalMove and change nothing if any may not."""
        if not len(sequences):
            return
        sources = self.state[sequences]
        targets = np.broadcast_to(np.asarray(target), sources.shape)
        bad = ~self._legal[sources, targets]
        if bad.any():
            first = int(np.flatnonzero(bad)[0])
            name = int(sequences[first])
            raise IllegalMove(
                f"sequence {name}: {State(int(sources[first])).name.lower()} -> "
                f"{State(int(targets[first])).name.lower()} is not a legal move; {int(bad.sum())} of "
                f"{len(sequences)} refused. Story: {self.story(name)}"
            )
        self.counts -= np.bincount(sources, minlength=len(State))
        self.counts += np.bincount(targets, minlength=len(State))
        self.state[sequences] = targets
        size = len(self._story)
        tail = min(len(sequences), size)
        at = (self._told + len(sequences) - tail + np.arange(tail)) % size
        self._story[at, 0] = round_number
        self._story[at, 1] = sequences[-tail:]
        self._story[at, 2] = sources[-tail:]
        self._story[at, 3] = targets[-tail:]
        self._told += len(sequences)

    def restore(self, sequences: NDArray[np.int64], target: State) -> None:
        """Put sequences into the end state that an earlier attempt of the job brought them to.

        That is no move: raises InternalError and changes nothing unless they wait, owned by nobody, and `target` is
        DONE or FAILED.
        """
        fresh = (self.state[sequences] == State.WAITING) & (self.owner[sequences] < 0)
        if not fresh.all() or target not in (State.DONE, State.FAILED):
            raise InternalError(
                f"{int((~fresh).sum())} of {len(sequences)} sequences cannot be restored as {target.name.lower()}: "
                "they have begun here"
            )
        self.state[sequences] = target
        self.counts[State.WAITING] -= len(sequences)
        self.counts[target] += len(sequences)

    def story(self, sequence: int) -> str:
        """Tell the remembered moves of one sequence, oldest first."""
        ring = np.roll(self._story, -(self._told % len(self._story)), axis=0)
        lines = [
            f"round {r}: {State(int(a)).name.lower()} -> {State(int(b)).name.lower()}"
            for r, s, a, b in ring
            if s == sequence
        ]
        return "; ".join(lines) or "no move remembered"

    def check(self) -> None:
        """Raise InternalError unless the counts equal what the table holds (law 5 in part)."""
        real = np.bincount(self.state, minlength=len(State))
        if not np.array_equal(real, self.counts):
            raise InternalError(f"state counts {self.counts.tolist()} differ from the table's {real.tolist()}")
