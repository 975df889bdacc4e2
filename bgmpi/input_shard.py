"""Which share of the input a run computes, and how its files are named: shard K of N.

The shards of an input are separate jobs (the tasks of a Slurm array, or two sites by hand) with separate outputs, locks
and parts, joined afterwards by `bgmpi merge`.  Row r of the input belongs to shard r mod N: inputs are often sorted by
length or source, and dealing them out gives every shard a like share of each kind, where runs of neighbours would give
one shard all long rows.  Dealing also keeps a row in its shard when lines are appended, and a row's number is computed
and never stored.  What it costs: a prefix that neighbours share is computed once a shard.

Pure: it reads words and the environment and opens nothing.  It says "shard" of an input; `shard.py` splits a model.

Invariant: the shards 0 to N - 1 are disjoint and complete, and no two of them write the same file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from bgmpi.errors import UsageError

OFF = "off"
#: Slurm's own default limit of an array, and that of most sites: ids 0 to 1000.
USUAL_TASKS = 1001
_PLACE, _PLACES = "{shard}", "{shards}"
_ADVICE = "pass --shard K/N for shard K (from 0) of N, or --shard off for the whole input"


@dataclass(frozen=True, slots=True)
class InputShard:
    """Shard `number` (from 0) of `count`."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def rows(self, total: int) -> int:
        """Return how many of `total` rows it has."""
        return len(range(self.number, total, self.count))

    def file_name(self, path: str) -> str:
        """Return the name of its own file for a name that all shards were given.

        {shard} and {shards} in it are filled in; else the shard stands before the suffix.  A device stays itself.
        """
        if path.startswith("/dev/"):
            return path
        if _PLACE in path:
            return path.replace(_PLACE, f"{self.number:04}").replace(_PLACES, f"{self.count:04}")
        folder, slash, name = path.rpartition("/")
        stem, dot, suffix = name.rpartition(".")
        if not stem:
            stem, dot, suffix = name, "", ""
        return f"{folder}{slash}{stem}.shard-{self.number:04}-of-{self.count:04}{dot}{suffix}"


def read_shard(value: object) -> str:
    """Read K/N with 0 <= K < N, or off (none)."""
    wrong = ValueError(f"expected K/N with K from 0 to N - 1, such as 0/4, or off, got {value!r}")
    word = value.strip().lower() if isinstance(value, str) else ""
    if word in (OFF, "none"):
        return OFF
    match = re.fullmatch(r"([0-9]{1,9})\s*/\s*([0-9]{1,9})", word)
    if match is None or int(match[1]) >= int(match[2]):
        raise wrong
    return f"{int(match[1])}/{int(match[2])}"


def this_shard(asked: str | None, environ: Mapping[str, str]) -> InputShard | None:
    """Return the shard that was asked for (as `read_shard` returns it), else that of a Slurm array's task, else None.

    Raise UsageError for a task whose place in its array cannot be told.
    """
    if asked is not None or not environ.get("SLURM_ARRAY_TASK_ID"):
        return shard_of(asked)
    return _array_task(environ)


def shard_of(word: str | None) -> InputShard | None:
    """Return the shard that a word of `read_shard` names, None for the whole input."""
    if word is None or word == OFF:
        return None
    number, _, count = word.partition("/")
    return InputShard(int(number), int(count))


def without_shard(path: str, flag: str) -> str:
    """Return the name itself; raise UsageError where it waits for the number of a shard."""
    if _PLACE in path:
        raise UsageError(f"{flag} {path}: {_PLACE} is only filled in where the input is sharded; pass --shard K/N")
    return path


def shard_pattern(path: str) -> str:
    """Return the name of every shard's file for the name that all were given, as a pattern of file names."""
    folder, slash, name = path.rpartition("/")
    stem, dot, suffix = name.rpartition(".")
    if not stem:
        stem, dot, suffix = name, "", ""
    return f"{folder}{slash}{stem}.shard-*-of-*{dot}{suffix}"


# --- inside ---------------------------------------------------------------------------------------------------------


def _array_task(environ: Mapping[str, str]) -> InputShard:
    """Return the rank of an array's task among the array's ids, which may begin anywhere and go by steps.

    Ids without one step (--array=1,3,7) are refused: Slurm tells a task how many there are, not which.  So is a lone
    task: most often a shard of an earlier array is meant, and the whole input would be computed.
    """
    found = {word: environ.get(f"SLURM_ARRAY_TASK_{word}", "") for word in ("ID", "COUNT", "MIN", "MAX")}
    unread = [f"SLURM_ARRAY_TASK_{word}={value!r}" for word, value in found.items() if not re.fullmatch(r"\d+", value)]
    if unread:
        raise UsageError(f"a task of a Slurm array, whose place cannot be told from {', '.join(unread)}; {_ADVICE}")
    task, count, first, last = (int(value) for value in found.values())
    if count == 1:
        raise UsageError(f"the only task (id {task}) of a Slurm array: of how many shards is it one? {_ADVICE}")
    given = environ.get("SLURM_ARRAY_TASK_STEP", "")
    step = int(given) if re.fullmatch(r"[1-9]\d*", given) else max(1, (last - first) // max(1, count - 1))
    place, beside = divmod(task - first, step)
    if first + step * (count - 1) != last or beside or not 0 <= place < count:
        raise UsageError(
            f"task {task} of a Slurm array of {count} ids from {first} to {last}: which place it has cannot be told, "
            f"because the ids do not go by one step (as in --array=0-{max(1, count - 1)} or 1-9:2); {_ADVICE}"
        )
    return InputShard(place, count)
