"""Writes what rank 0 heard and said in every round, and gives it back, so that any decision can be replayed.

The scheduler is pure (design section 3): its events are all that it knows and its instructions all that it does, so
these two lists a round are the whole truth about a run.  The file is JSON lines: a header, then one line a round;
each record carries the name of its type, arrays are lists of integers.  A line that a kill tore is left out.
It knows the record types of `primitives.py` and nothing of who decides.

Rejected alternative: pickle, which no other program reads and no later version of this one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, get_args

import msgspec
import numpy as np

from bgmpi.errors import InputError
from bgmpi.primitives import Event, Instruction

FORMAT = "bgmpi-trace"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Round:
    """One round: what was heard, and what was said to each rank (`instructions[r]` is rank r's list)."""

    number: int
    seconds: float
    events: list[Event]
    instructions: list[list[Instruction]]


class TraceWriter:
    """Appends rounds to a new file.  A context manager; each round is flushed, so a kill tears one line at most."""

    def __init__(self, path: str | Path) -> None:
        """Create the file (an older one of that name is replaced) and write its header."""
        self._file = Path(path).open("wb")  # noqa: SIM115 - closed by close, the writer is the context manager
        self._write({"format": FORMAT, "version": VERSION})

    def round(self, number: int, seconds: float, events: Sequence[Event],
              instructions: Sequence[Sequence[Instruction]]) -> None:
        """Append one round; `seconds` since the job began, `instructions` one sequence a rank."""
        self._write({
            "round": number,
            "seconds": seconds,
            "events": [_tagged(event) for event in events],
            "instructions": [[_tagged(one) for one in rank] for rank in instructions],
        })

    def close(self) -> None:
        """Close the file.  May be called twice."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, record: dict[str, object]) -> None:
        self._file.write(msgspec.json.encode(record, enc_hook=_as_list) + b"\n")
        self._file.flush()


def read_trace(path: str | Path) -> Iterator[Round]:
    """Yield the rounds of a trace, arrays as int64.  Raise InputError when it is not a trace of this version."""
    with open(path, "rb") as file:
        _check_header(path, file.readline())
        for line_number, line in enumerate(file, start=2):
            if not line.endswith(b"\n"):
                return
            try:
                record = msgspec.json.decode(line)
                yield Round(
                    record["round"],
                    record["seconds"],
                    [_untagged(event) for event in record["events"]],
                    [[_untagged(one) for one in rank] for rank in record["instructions"]],
                )
            except (msgspec.DecodeError, KeyError, TypeError) as error:
                raise InputError(f"{path}: line {line_number} is not a round: {error!r}") from None


def _check_header(path: str | Path, line: bytes) -> None:
    try:
        header = msgspec.json.decode(line)
    except msgspec.DecodeError:
        header = None
    expected = {"format": FORMAT, "version": VERSION}
    if header != expected:
        raise InputError(f"{path}: expected a trace beginning with {expected}, got {line[:80]!r}")


def _tagged(record: Event | Instruction) -> dict[str, object]:
    values = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    return {"type": type(record).__name__, **values}


def _untagged(record: dict[str, Any]) -> Any:
    kinds = {kind.__name__: kind for kind in (*get_args(Event), *get_args(Instruction))}
    values = {
        name: np.asarray(value, np.int64) if isinstance(value, list) else value
        for name, value in record.items()
        if name != "type"
    }
    return kinds[record["type"]](**values)


def _as_list(value: object) -> object:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise NotImplementedError(f"a trace cannot hold {type(value).__name__}")
