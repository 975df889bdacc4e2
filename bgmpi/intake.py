"""Rank 0 reads ahead: rows of the input become requests, and requests become work for ranks.

Only as many requests are held as the scheduler wants to see, so memory does not grow with the input; in which order
they are read is `fairness`'s matter.  A row that
cannot run becomes an error row at once and harms no other.  Rows that an earlier attempt ended are not even read, and
what it had of unfinished ones goes along with them.  It decides nothing about placement.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bgmpi.errors import InputError, RowError
from bgmpi.fairness import Wishes, turns_of
from bgmpi.io.requests import RowRefused
from bgmpi.primitives import Arrived, Event, Ids, InputEnded, Refused, Restored
from bgmpi.rank import Work
from bgmpi.recovery import Left
from bgmpi.request import Answer, Begun, Finish, Request


class Reader(Protocol):
    """Reads single rows: the requests of one row, or why it is refused."""

    def read(self, row: int) -> tuple[Request, ...] | RowRefused:
        """Return row `row`'s requests; the j-th one's samples are numbered from j * its `samples`."""


class Intake:
    """The rows that were read and have no rank yet.

    first int64 [rows + 1]: each row's first sequence; left: what earlier attempts left; context: the longest a sequence
    can become by the model, pool: by the smallest rank's KV memory, both in tokens; strict: a bad row ends the job;
    refuse: takes the error answer of a row that never runs; wishes: what rows ask of the order.
    """

    def __init__(
        self,
        reader: Reader,
        first: NDArray[np.int64],
        *,
        left: Left,
        context: int,
        pool: int,
        strict: bool,
        clock: Callable[[], float],
        refuse: Callable[[Answer], None],
        wishes: Wishes | None = None,
    ) -> None:
        self.first = first
        self._reader = reader
        self._context = context
        self._pool = pool
        self._strict = strict
        self._clock = clock
        self._refuse = refuse
        self._left = left
        ended = left.ended
        rows = np.flatnonzero(np.diff(np.concatenate(([0], np.cumsum(~ended)))[first]))
        #: rows with a sequence that has not ended
        self._turns = turns_of(rows, wishes or Wishes())
        self._next = 0
        self._held: dict[int, tuple[Request, int, int, float, int]] = {}
        self._told_left = not ended.any()
        self._ended = False

    @property
    def rows(self) -> int:
        """Rows of the input."""
        return len(self.first) - 1

    @property
    def sequences(self) -> int:
        """Sequences of the job."""
        return int(self.first[-1])

    def rows_of(self, sequences: Ids) -> Ids:
        """Return the row of each sequence, int64 [k]."""
        return np.searchsorted(self.first, sequences, side="right") - 1

    def read(self, wanted: int) -> list[Event]:
        """Read rows until `wanted` sequences have arrived or the input ends; -> what rank 0 should hear."""
        names: list[int] = []
        prompts: list[int] = []
        caps: list[int] = []
        decoded: list[int] = []
        refused: list[NDArray[np.int64]] = []
        left = self._left
        while len(names) < wanted and self._next < len(self._turns.rows):
            row, level = int(self._turns.rows[self._next]), int(self._turns.level[self._next])
            self._next += 1
            found = self._reader.read(row)
            found = self._without_giants(found) if isinstance(found, tuple) else found
            if isinstance(found, RowRefused):
                if self._strict:
                    raise InputError(f"--strict: {found.error.message}")
                self._refuse(error_answer(found))
                never = np.arange(self.first[row], self.first[row + 1])
                refused.append(never[~left.ended[never]])
                continue
            sequence = int(self.first[row])
            now = self._clock()
            for place, request in enumerate(found):
                most = self._most(request)
                for sample in range(place * request.samples, (place + 1) * request.samples):
                    if not left.ended[sequence]:
                        self._held[sequence] = (request, sample, most, now, level)
                        names.append(sequence)
                        prompts.append(len(request.prompt))
                        caps.append(most - len(request.prompt))
                        begun = self._begun(sequence, caps[-1])
                        decoded.append(0 if begun is None else len(begun.tokens))
                    sequence += 1
        events: list[Event] = []
        if not self._told_left:
            self._told_left = True
            events.append(Restored(np.flatnonzero(left.done), np.flatnonzero(left.failed)))
        if refused:
            events.append(Refused(np.concatenate(refused)))
        if names:
            columns = (np.array(column, np.int64) for column in (names, prompts, caps, decoded if any(decoded) else []))
            events.append(Arrived(*columns))
        if self._next == len(self._turns.rows) and not self._ended:
            self._ended = True
            events.append(InputEnded())
        return events

    def take(self, sequences: Ids) -> list[Work]:
        """Hand over sequences that were admitted to a rank; samples of one request travel together."""
        work: list[Work] = []
        for sequence in sequences.tolist():
            request, sample, most, queued, level = self._held.pop(sequence)
            if not work or work[-1].request is not request:
                work.append(Work(request, [], [], most, queued, level=level))
            work[-1].sequences.append(sequence)
            work[-1].samples.append(sample)
            begun = self._begun(sequence, most - len(request.prompt))
            if begun is not None:
                work[-1].begun[sequence] = begun
        return work

    def _begun(self, sequence: int, cap: int) -> Begun | None:
        """Return what an earlier attempt had of a sequence, unless it may not become that long here."""
        begun = self._left.begun.get(sequence)
        return begun if begun is not None and len(begun.tokens) < cap else None

    def _most(self, request: Request) -> int:
        limit = min(self._context, self._pool)
        asked = request.sampling.max_tokens
        return limit if asked is None else min(limit, len(request.prompt) + asked)

    def _without_giants(self, requests: tuple[Request, ...]) -> tuple[Request, ...] | RowRefused:
        """Refuse a row that no rank's KV memory can ever hold (law 6): it would wait for ever."""
        for request in requests:
            asked = request.sampling.max_tokens
            need = min(self._context, len(request.prompt) + (1 if asked is None else asked))
            if need > self._pool:
                message = (
                    f"the prompt has {len(request.prompt)} tokens and max_tokens is {asked}: {need} tokens of KV are "
                    f"needed, a rank holds {self._pool}; raise --host-kv-memory (and --device-memory where it is set) "
                    f"or lower max_tokens"
                )
                error = RowError("insufficient_kv_memory", message, "max_tokens")
                return RowRefused(request.row, request.custom_id, request.url, error)
        return requests


def error_answer(refused: RowRefused) -> Answer:
    """Return the answer of a whole row that never ran."""
    return Answer(
        row=refused.row,
        sample=-1,
        custom_id=refused.custom_id,
        finish=Finish.ERROR,
        prompt_tokens=0,
        tokens=np.empty(0, np.int32),
        text="",
        error=refused.error,
        url=refused.url,
    )
