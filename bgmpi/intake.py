"""Rank 0 reads ahead: rows of the input become requests, and requests become work for ranks.

Only as many requests are held as the scheduler wants to see, so memory does not grow with the input; in which order
they are read is the matter of `fairness`, or of `unit_order` where prompts share prefixes.  A row that cannot run
becomes an error row at once and harms no other.  Rows that an earlier attempt ended are not even read, and what it had
of unfinished ones goes along with them.  It decides nothing about placement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from bgmpi.errors import InputError, RowError
from bgmpi.fairness import RowByRow, Wishes, turns_of
from bgmpi.io.requests import RowRefused
from bgmpi.primitives import Arrived, Counts, Event, Ids, InputEnded, Refused, Restored
from bgmpi.rank import Work
from bgmpi.recovery import Left
from bgmpi.request import Answer, Begun, Finish, Request
from bgmpi.sharing import sharing_of
from bgmpi.tokenising import Prompts


class Reader(Protocol):
    """Reads single rows: the requests of one row, or why it is refused."""

    def read(self, row: int, known: Sequence[NDArray[np.int32]] | None = None) -> tuple[Request, ...] | RowRefused:
        """Return row `row`'s requests; the j-th one's samples are numbered from j * its `samples`.  known: the ids of
        its prompts, where they are there already."""


class Order(Protocol):
    """Whose turn it is."""

    @property
    def left(self) -> int:
        """Rows that were not read yet."""

    def next(self) -> tuple[list[int], int]:
        """Return the rows that are read next, together, and how urgent they are.  Only while rows are left."""


class _Held(NamedTuple):
    """A sequence that was read and has no rank yet.  prompt: its number in the job, where all are tokenised already."""

    request: Request
    sample: int
    most: int
    queued: float
    level: int
    prompt: int


@dataclass(slots=True)
class _Arriving:
    """What one call of `read` gathers, a column an attribute of `Arrived`; units: how many, seen: nodes of this one."""

    sequences: list[int] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    cap: list[int] = field(default_factory=list)
    decoded: list[int] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)
    unit: list[int] = field(default_factory=list)
    refused: list[Ids] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)

    def events(self) -> Iterator[Event]:
        """Yield what rank 0 should hear."""
        if self.refused:
            yield Refused(np.concatenate(self.refused))
        if self.sequences:
            alone = len(set(self.unit)) == len(self.unit)
            columns = (
                self.sequences, self.prompt, self.cap, self.decoded if any(self.decoded) else [],
                self.shared if any(self.shared) else [], [] if alone else self.unit,
            )  # fmt: skip
            yield Arrived(*(np.array(column, np.int64) for column in columns))


class Intake:
    """The rows that were read and have no rank yet.

    first int64 [rows + 1]: each row's first sequence; left: what earlier attempts left; context: the longest a sequence
    can become by the model, pool: by the smallest rank's KV memory, both in tokens; strict: a bad row ends the job;
    refuse: takes the error answer of a row that never runs; wishes: what rows ask of the order; prompts: those of the
    job, where they are tokenised already, and what they share.
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
        prompts: Prompts | None = None,
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
        #: those with a sequence that has not ended
        rows = np.flatnonzero(np.diff(np.concatenate(([0], np.cumsum(~ended)))[first]))
        self._prompts = prompts
        self._sharing = sharing_of(prompts, rows, wishes or Wishes(), min(context, pool))
        self._order: Order = self._sharing.order if self._sharing else RowByRow(turns_of(rows, wishes or Wishes()))
        self._units = 0
        self._held: dict[int, _Held] = {}
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

    def learn(self, answered: Iterable[Counts]) -> None:
        """Take caps and tokens of the answers that ended, as the ranks of one round report them: the order follows."""
        if self._sharing is not None:
            self._sharing.learn(answered)

    def take_closed(self) -> list[int]:
        """Return the shared prefixes to which nobody comes any more since the last call, and not every rank knows."""
        return self._sharing.ledger.take_closed() if self._sharing is not None else []

    def read(self, wanted: int) -> list[Event]:
        """Read rows until `wanted` sequences have arrived or the input ends, a unit to its end; -> what rank 0 should
        hear."""
        arriving = _Arriving()
        while len(arriving.sequences) < wanted and self._order.left:
            rows, level = self._order.next()
            arriving.seen.clear()
            self._units += 1
            for row in rows:
                self._read_row(row, level, arriving)
        events: list[Event] = []
        if not self._told_left:
            self._told_left = True
            events.append(Restored(np.flatnonzero(self._left.done), np.flatnonzero(self._left.failed)))
        events += arriving.events()
        if not self._order.left and not self._ended:
            self._ended = True
            if self._prompts is not None:
                self._prompts.store.close()  # before the folder that it lies in goes
            events.append(InputEnded())
        return events

    def take(self, sequences: Ids) -> list[Work]:
        """Hand over sequences that were admitted to a rank; samples of one request travel together."""
        held = [self._held.pop(sequence) for sequence in sequences.tolist()]
        if self._sharing is not None:  # all of them first: who goes along is nobody who is still to come
            for one in held:
                self._sharing.ledger.leave(one.prompt, 1)
        work: list[Work] = []
        for sequence, one in zip(sequences.tolist(), held, strict=True):
            request = one.request
            if not work or work[-1].request is not request:
                prefixes = self._sharing.ledger.prefixes(one.prompt) if self._sharing is not None else ()
                work.append(Work(request, [], [], one.most, one.queued, level=one.level, prefixes=prefixes))
            work[-1].sequences.append(sequence)
            work[-1].samples.append(one.sample)
            begun = self._begun(sequence, one.most - len(request.prompt))
            if begun is not None:
                work[-1].begun[sequence] = begun
        return work

    def _read_row(self, row: int, level: int, arriving: _Arriving) -> None:
        """Let a row's sequences arrive, or refuse all of them."""
        found = self._reader.read(row, self._prompts.known(row) if self._prompts is not None else None)
        found = self._without_giants(found) if isinstance(found, tuple) else found
        sequences = range(int(self.first[row]), int(self.first[row + 1]))
        if isinstance(found, RowRefused):
            if self._strict:
                raise InputError(f"--strict: {found.error.message}")
            self._refuse(error_answer(found))
            never = np.array(sequences)
            arriving.refused.append(never[~self._left.ended[never]])
            if self._sharing is not None:
                self._sharing.refuse(row)
            return
        now = self._clock()
        first_prompt = int(self._prompts.first[row]) if self._prompts is not None else 0
        for sequence, sample in zip(sequences, range(len(sequences)), strict=True):
            if self._left.ended[sequence]:
                continue
            place = sample // found[0].samples
            request, prompt = found[place], first_prompt + place
            most = self._most(request)
            self._held[sequence] = _Held(request, sample, most, now, level, prompt)
            cap = most - len(request.prompt)
            begun = self._begun(sequence, cap)
            shared = self._sharing.covered(prompt, arriving.seen) if self._sharing is not None else 0
            arriving.sequences.append(sequence)
            arriving.prompt.append(len(request.prompt))
            arriving.cap.append(cap)
            arriving.decoded.append(0 if begun is None else len(begun.tokens))
            arriving.shared.append(shared)
            arriving.unit.append(self._units)

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
