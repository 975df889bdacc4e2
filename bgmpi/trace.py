"""Writes what rank 0 heard and said in every round, and gives it back, so that any decision can be replayed.

The scheduler is pure (design section 3): its events are all that it knows and its instructions all that it does, so
these two lists a round are the whole truth about a run.  The file is JSON lines: a header, then one line a round; each
record carries the name of its type and arrays are lists of integers, so any program reads it.  A line that a kill
tore is left out.  It knows the record types of `primitives.py` and nothing of who decides.

Rejected alternative: the MessagePack that crosses ranks, which nobody reads with a pager and grep.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np

from bgmpi.errors import InputError
from bgmpi.primitives import Event, Instruction

FORMAT = "bgmpi-trace"
VERSION = 1


class Round(msgspec.Struct, frozen=True, eq=False):
    """One round: what was heard, and what was said to each rank (`instructions[r]` is rank r's list)."""

    round: int
    seconds: float
    events: list[Event]
    instructions: list[list[Instruction]]


class _Header(msgspec.Struct, frozen=True):
    format: str = FORMAT
    version: int = VERSION


class TraceWriter:
    """Appends rounds to a new file.  A context manager; each round is flushed, so a kill tears one line at most."""

    def __init__(self, path: str | Path) -> None:
        """Create the file (an older one of that name is replaced) and write its header."""
        self._file = Path(path).open("wb")  # noqa: SIM115 - closed by close, the writer is the context manager
        self._write(_Header())

    def round(self, number: int, seconds: float, events: Sequence[Event],
              instructions: Sequence[Sequence[Instruction]]) -> None:
        """Append one round; `seconds` since the job began, `instructions` one sequence a rank."""
        self._write(Round(number, seconds, list(events), [list(one) for one in instructions]))

    def close(self) -> None:
        """Close the file.  May be called twice."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, record: msgspec.Struct) -> None:
        self._file.write(msgspec.json.encode(record, enc_hook=_as_list) + b"\n")
        self._file.flush()


def read_trace(path: str | Path) -> Iterator[Round]:
    """Yield the rounds of a trace, arrays as int64.  Raise InputError when it is not a trace of this version."""
    decoder = msgspec.json.Decoder(Round, dec_hook=_as_array)
    with open(path, "rb") as file:
        _check_header(path, file.readline())
        for line_number, line in enumerate(file, start=2):
            if not line.endswith(b"\n"):
                return
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as error:
                raise InputError(f"{path}: line {line_number} is not a round: {error}") from None


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
