"""Decides what an attempt does with what earlier ones left: go on, begin anew, refuse, or nothing at all.

Pure: it is told what lies there and answers; `resume` looks and carries it out.  Nothing that a user might still want
is thrown away unasked: another result, or parts made with other settings, is a usage error that says what differs and
which words decide it.  Going on is the default, because a batch system starts a job again with the same words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from bgmpi.errors import UsageError
from bgmpi.primitives import Ids
from bgmpi.request import Begun

Flags = NDArray[np.bool_]


class Start(StrEnum):
    """How an attempt begins.  REOPEN: with the answers of the output that is published; NOTHING: all is there
    already."""

    FRESH = "fresh"
    RESUME = "resume"
    REOPEN = "reopen"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Rows:
    """How the rows of a published output meet those of the present input.

    kept: rows of both, failed: error rows among them; new: of the input alone, added or edited; gone: of the output
    alone.
    """

    kept: int
    new: int = 0
    gone: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """What lies at the output's place.

    output: its path; exists: whether it is there; whole: whether it is complete and answers the same input; settings:
    what its answers depend on, None where it is no complete output of this program; rows: None where they cannot be
    told; parts: settings of the newest attempt that left parts, None when there are none; folder: of the parts.
    """

    output: str
    folder: str
    exists: bool = False
    whole: bool = False
    settings: Mapping[str, str] | None = None
    rows: Rows | None = None
    parts: Mapping[str, str] | None = None


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Say in words which settings differ."""
    names = sorted({*before, *now})
    return [
        f"{name} was {before.get(name, 'not set')}, is {now.get(name, 'not set')}"
        for name in names
        if before.get(name) != now.get(name)
    ]


def how_to_start(
    found: Found,
    settings: Mapping[str, str],
    *,
    resume: str,
    overwrite: bool,
    requeued: bool,
    retry_failed: bool = False,
) -> Start:
    """Decide; raise UsageError where only the user can.

    resume: auto, never, must or force; overwrite: an output may be replaced; requeued: a batch system has started this
    job again, so an output that answers it is its own; retry_failed: error rows are to be computed again.
    """
    if resume == "never":
        taken = found.exists or found.parts is not None
        if taken and not overwrite:
            what = found.output if found.exists else found.folder
            raise UsageError(f"{what} exists; pass --overwrite to replace it, or another --output-file")
        return Start.FRESH
    if found.parts is not None:
        changed = differences(found.parts, settings)
        if not changed or resume == "force":
            return Start.RESUME
        if overwrite and resume == "auto":
            return Start.FRESH
        raise UsageError(
            f"{found.folder} holds answers of other settings: {'; '.join(changed)}. Pass --resume force to keep "
            f"them and go on, --overwrite to begin anew, or another --output-file"
        )
    if not found.exists:
        if resume == "must":
            raise UsageError(f"--resume must: there is nothing to go on with at {found.output}; leave it out to begin")
        return Start.FRESH
    changed = differences(found.settings, settings) if found.settings is not None else []
    reuse = resume in ("must", "force")
    if found.settings is not None and not changed and found.whole and (requeued or reuse or not overwrite):
        return Start.REOPEN if retry_failed and found.rows is not None and found.rows.failed else Start.NOTHING
    if reuse and found.rows is not None and (not changed or resume == "force"):
        return Start.REOPEN
    if overwrite and resume != "must":
        return Start.FRESH
    raise UsageError(f"{found.output} exists and is not the answer to this job{_why(found, changed)}")


def _why(found: Found, changed: list[str]) -> str:
    """Say what is another about a published output, and which words decide."""
    anew = "--overwrite to replace it, or another --output-file"
    if found.settings is None:
        return f"; pass {anew}"
    if changed:
        return f", its settings are others: {'; '.join(changed)}. Pass --resume force to keep its answers, {anew}"
    if found.rows is None:
        return (
            f": its input was another one, and which of its answers still hold cannot be told, because it was written "
            f"before outputs had hashes of their rows; pass {anew}"
        )
    rows = found.rows
    return (
        f": {rows.new} rows of the input are new or edited, {rows.gone} of its rows are gone, {rows.kept} have their "
        f"answers there. Pass --resume must to keep these and compute only the others, {anew}"
    )


def restoring_pays(
    size: NDArray[np.int64], tokens: NDArray[np.int64], read_rate: float, prefill_rate: float
) -> Flags:
    """Say for which sequences reading their KV takes less time than computing it again, bool [k].

    size: bytes of KV; tokens: whose KV it is, both int64 [k]; read_rate: bytes a second; prefill_rate: tokens a second,
    NaN where nobody has measured it: then reading does.
    """
    if np.isnan(prefill_rate) or prefill_rate <= 0:
        return np.ones(len(size), bool)
    pays: Flags = size / read_rate < tokens / prefill_rate
    return pays


@dataclass(frozen=True, slots=True)
class Left:
    """What earlier attempts left of a job's sequences.

    done, failed: bool [sequences], ended with an answer or an error; begun: what unfinished ones have.
    """

    done: Flags
    failed: Flags
    begun: Mapping[int, Begun] = field(default_factory=dict)

    @property
    def ended(self) -> Flags:
        """Those that need nothing more, bool [sequences]."""
        return self.done | self.failed


def nothing_left(sequences: int) -> Left:
    """Return what a first attempt finds."""
    return Left(np.zeros(sequences, bool), np.zeros(sequences, bool))


def ended_sequences(first: Ids, row: Ids, sample: NDArray[np.int32], is_error: Flags) -> tuple[Flags, Flags]:
    """Return which sequences the answers [k] ended well, and which as errors: two of bool [sequences].

    first: int64 [rows + 1], each row's first sequence; sample -1 stands for all sequences of its row.
    """
    done, failed = np.zeros(int(first[-1]), bool), np.zeros(int(first[-1]), bool)
    single = (sample >= 0) & (sample < np.diff(first)[row])
    named = first[row[single]] + sample[single]
    done[named[~is_error[single]]] = True
    failed[named[is_error[single]]] = True
    whole = np.zeros(len(first) - 1, bool)
    whole[row[sample < 0]] = True
    failed |= np.repeat(whole, np.diff(first))
    return done & ~failed, failed
