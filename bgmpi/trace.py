"""Writes what rank 0 heard and said in every round and what every rank did, for replays and for timelines.

The scheduler is pure (design section 3): its events are all that it knows and its instructions all that it does, so
these two lists a round are the whole truth about its decisions.  What took time and moved bytes are the ranks' deeds,
which the scheduler never reads.  So the file is JSON lines of two kinds behind a header, told apart by `line`:

    {"line":"round","round":7,"seconds":1.5,"events":[...],"instructions":[[...], ...]}
    {"line":"deed","time":1.25,"rank":3,"what":"yield","sequences":[17,40],"bytes":65536,"seconds":0.001}

A deed's line has no nesting, so `jq`, pandas and awk read it; beside the primitives (`run`, `yield`, `combine`,
`migrate`, `partition`, `spill`) every event of a sequence leaves one (`arrived`, `refused`, `restored`, or the state
that it went to: `active`, `done`, ...), with no bytes and no seconds and the time of the round that heard of it.  Lines
of deeds stand before the line of their round, and a line that a kill tore is left out.  Everything is written and read
a line at a time, so neither costs memory, and a sequence costs about a hundred bytes of file over its life.

Rejected alternatives: the MessagePack that crosses ranks, which nobody reads with a pager and grep; deeds inside the
rounds' reports, where only a program that knows all records finds them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np

from bgmpi.coroutine import State
from bgmpi.errors import InputError, MissingError
from bgmpi.primitives import NOBODY, Arrived, Event, Ids, InputEnded, Instruction, Refused, Reported, Restored

FORMAT = "bgmpi-trace"
VERSION = 2
#: What a line of a deed says that is the line of an event.
EVENTS = frozenset(("arrived", "refused", "restored", "input_ended", *(state.name.lower() for state in State)))


class Round(msgspec.Struct, frozen=True, eq=False, tag_field="line", tag="round"):
    """One round: what was heard, and what was said to each rank (`instructions[r]` is rank r's list).

    Reports are without their deeds, which have lines of their own.
    """

    round: int
    seconds: float
    events: list[Event]
    instructions: list[list[Instruction]]


class DeedLine(msgspec.Struct, frozen=True, eq=False, tag_field="line", tag="deed"):
    """Something that a rank did, or that became of sequences: when it began and how long it took in seconds of the
    job's clock, the rank, what, the sequences that it was about, and the bytes that it moved."""

    time: float
    rank: int
    what: str
    sequences: Ids
    bytes: int
    seconds: float


class _Header(msgspec.Struct, frozen=True):
    format: str = FORMAT
    version: int = VERSION


class _OtherRound(msgspec.Struct, frozen=True, tag_field="line", tag="round"):
    """A round that a reader of deeds passes over."""


class _OtherDeed(msgspec.Struct, frozen=True, tag_field="line", tag="deed"):
    """A deed that a reader of rounds passes over."""


class TraceWriter:
    """Appends rounds to a new file.  A context manager; each round is flushed, so a kill tears one line at most."""

    def __init__(self, path: str | Path) -> None:
        """Create the file (an older one of that name is replaced) and write its header."""
        self._file = Path(path).open("wb")  # noqa: SIM115 - closed by close, the writer is the context manager
        self._write(_Header())
        self._file.flush()

    def round(self, number: int, seconds: float, events: Sequence[Event],
              instructions: Sequence[Sequence[Instruction]]) -> None:
        """Append one round; `seconds` since the job began, `instructions` one sequence a rank."""
        bare: list[Event] = []
        for event in events:
            for line in _lines_of(event, seconds):
                self._write(line)
            told = isinstance(event, Reported) and event.deeds
            bare.append(msgspec.structs.replace(event, deeds=()) if told else event)
        self._write(Round(number, seconds, bare, [list(one) for one in instructions]))
        self._file.flush()

    def close(self) -> None:
        """Close the file.  May be called twice."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, record: msgspec.Struct) -> None:
        self._file.write(msgspec.json.encode(record, enc_hook=_as_list) + b"\n")


def read_trace(path: str | Path) -> Iterator[Round]:
    """Yield the rounds of a trace, arrays as int64.  Raise InputError when it is not a trace of this version."""
    for record in _records(path, Round | _OtherDeed):
        if isinstance(record, Round):
            yield record


def read_deeds(path: str | Path) -> Iterator[DeedLine]:
    """Yield the deeds of a trace, those of one rank oldest first.  Raise InputError when it is not a trace of this
    version."""
    for record in _records(path, DeedLine | _OtherRound):
        if isinstance(record, DeedLine):
            yield record


def is_trace(path: str | Path) -> bool:
    """Return whether the file says that it is a trace, of whatever version; what cannot be read is none."""
    try:
        with open(path, "rb") as file:
            start = file.readline(200)
    except OSError:
        return False
    return start.startswith(b"{") and FORMAT.encode() in start


def _lines_of(event: Event, seconds: float) -> Iterator[DeedLine]:
    """Yield the lines that an event leaves, heard `seconds` after the job began."""
    match event:
        case Arrived():
            yield DeedLine(seconds, 0, "arrived", event.sequences, 0, 0.0)
        case Refused():
            yield DeedLine(seconds, 0, "refused", event.sequences, 0, 0.0)
        case Restored():
            yield DeedLine(seconds, 0, "restored", np.concatenate((event.done, event.failed)), 0, 0.0)
        case InputEnded():
            yield DeedLine(seconds, 0, "input_ended", NOBODY, 0, 0.0)
        case Reported():
            for deed in sorted(event.deeds, key=lambda one: one.begun):
                yield DeedLine(deed.begun, event.rank, deed.what, deed.sequences, deed.bytes, deed.seconds)
            for moved in event.moves:
                yield DeedLine(seconds, event.rank, State(moved.state).name.lower(), moved.sequences, 0, 0.0)


def _records(path: str | Path, kinds: Any) -> Iterator[msgspec.Struct]:
    decoder = msgspec.json.Decoder(kinds, dec_hook=_as_array)
    try:
        opened = open(path, "rb")  # noqa: SIM115 - only what opening raises is told so
    except OSError as error:
        raise MissingError(f"{path}: expected a trace, it cannot be read: {error.strerror}") from None
    with opened as file:
        _check_header(path, file.readline())
        for line_number, line in enumerate(file, start=2):
            if not line.endswith(b"\n"):
                return
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as error:
                raise InputError(f"{path}: line {line_number} is neither a round nor a deed: {error}") from None


def _check_header(path: str | Path, line: bytes) -> None:
    try:
        header = msgspec.json.decode(line, type=_Header)
    except msgspec.DecodeError:
        header = None
    if header != _Header() or b"format" not in line:
        raise InputError(f"{path}: expected a trace, its first line {_Header()}, got {line[:80]!r}")


def _as_list(value: object) -> object:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise NotImplementedError(f"a trace cannot hold {type(value).__name__}")


def _as_array(_: type, value: Any) -> Any:
    return np.asarray(value, np.int64)
