"""The few ways in which bgmpi fails, and what each means for the person who reads it.

Two kinds of failure exist and they never mix.  A `BgmpiError` ends the job: its `exit_code` is the exit code of
every rank.  A `RowError` is data: it ends one input row, travels like a result, and harms no other row.

Every message says who, what was expected, what was got, and what to do next.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of the program (design section 7)."""

    OK = 0
    UNEXPECTED = 1
    USAGE = 2
    ERROR_ROWS = 3
    INPUT = 65
    MISSING = 66
    INTERNAL = 70
    WRITE = 74
    STOPPED = 75


class BgmpiError(Exception):
    """Ends the job on every rank with `exit_code`; `agreed` once every rank has it."""

    exit_code: ExitCode = ExitCode.INTERNAL
    agreed: bool = False


class UsageError(BgmpiError):
    """A flag, a config value or the launch itself is wrong; nothing was started."""

    exit_code = ExitCode.USAGE


class InputError(BgmpiError):
    """The input file or the model's files are there but malformed."""

    exit_code = ExitCode.INPUT


class MissingError(BgmpiError):
    """A file that was named, or that an index promises, is not there."""

    exit_code = ExitCode.MISSING


class InternalError(BgmpiError):
    """A law was broken or numbers went bad: a fault of the program, never of the user."""

    exit_code = ExitCode.INTERNAL


class WriteError(BgmpiError):
    """Results could not be written; everything written earlier is intact."""

    exit_code = ExitCode.WRITE


class OutOfMemory(BgmpiError):
    """The machine has no more memory.  Fatal for the job: what was written stays, nothing is tried again in place."""

    exit_code = ExitCode.UNEXPECTED


class StoppedError(BgmpiError):
    """A signal or the wall time stopped the job; its state is saved, run again to go on."""

    exit_code = ExitCode.STOPPED


@dataclass(frozen=True, slots=True)
class RowError:
    """Why one input row has no answer.

    `code` is one of the codes that clients of the OpenAI batch API know (`invalid_request_error`,
    `context_length_exceeded`, ...); `param` names the field at fault; `line` is the physical line in the input file,
    counted from 1, 0 when unknown.
    """

    code: str
    message: str
    param: str | None = None
    line: int = 0
