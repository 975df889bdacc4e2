"""Forces primitives in every K-th round, so that a machine, or a test, sees them all without waiting for a need.

A drill decides nothing of its own that the tables forbid: it names active sequences to yield, suspended ones to move to
the next rank, and says when the last ones are to run over a group.  It draws no random number, so a drilled job replays
like any other, and every sequence still advances: who is forced in one turn is left alone in the next.

Yielding: half of the active ones of every rank, resumed a round later.  Migration: a quarter of what every rank has, to
the next rank.  Partition: flipped on and off at the job's tail (long_tail.py), because a group's ranks must have
nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from bgmpi.primitives import Ids, Migrate
from bgmpi.values import drill_rounds

_SHARE_MOVED = 4


@dataclass(frozen=True, slots=True)
class Drill:
    """Every how many rounds each primitive is forced; 0: never."""

    yields: int = 0
    migrations: int = 0
    partitions: int = 0

    @classmethod
    def parse(cls, text: str | None) -> Self:
        """Read "yield=K,migrate=K,partition=K" or some of them; None: nothing is forced.  Raise ValueError if wrong."""
        rounds = drill_rounds(text) if text is not None else {}
        return cls(rounds.get("yield", 0), rounds.get("migrate", 0), rounds.get("partition", 0))

    def to_yield(self, round_number: int, active: Sequence[Ids]) -> list[Ids]:
        """Return whom each rank makes yield: every second of its active ones, the others in the next turn."""
        turn = _turn(round_number, self.yields)
        return [names[(turn or 0) % 2 :: 2] if turn is not None else names[:0] for names in active]

    def to_migrate(
        self, round_number: int, standing: Sequence[Ids], need: Sequence[NDArray[np.int64]], pages: NDArray[np.int64],
        closed: NDArray[np.bool_],
    ) -> list[Migrate]:
        """Return moves of a quarter of each rank's sequences to the next rank, as long as its pages last.

        standing: sequences of each rank that may move, need: their pages; pages: free pages of each rank, int64
        [ranks]; closed: ranks that take no part, bool [ranks].
        """
        turn, ranks = _turn(round_number, self.migrations), len(standing)
        if turn is None or ranks == 1:
            return []
        moves = []
        for source, names in enumerate(standing):
            target = (source + 1) % ranks
            chosen = slice(turn % _SHARE_MOVED if len(names) >= _SHARE_MOVED else 0, None, _SHARE_MOVED)
            fits = np.cumsum(need[source][chosen]) <= pages[target]
            if fits.any() and not closed[source] and not closed[target]:
                moves.append(Migrate(names[chosen][fits], source, target))
        return moves


def _turn(round_number: int, every: int) -> int | None:
    """Return which turn of the drill this round is; None when it is none."""
    return round_number // every if every and round_number % every == 0 else None
