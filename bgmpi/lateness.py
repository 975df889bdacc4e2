"""Who holds the job up: the decision behind `--heartbeat`, from what is known of every rank at one moment.

In a collective everybody waits for the slowest, so most of those that stand still are victims.  Named are, in this
order: ranks that stand still and do not wait; where all that can be heard wait, ranks that were heard once and are
silent now (stopped, dead, or in a call that never lets go of the interpreter); else all, for they wait for each other.

It never takes silence alone for a fault: a rank that computes may be silent, and then nobody waits for it for long.
And where a rank was never heard (its network lets nothing through) waiting proves nothing, for that rank may be at
work; so the watch never ends a job because of the watch itself.  Pure: no clock, no thread, no socket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

#: Warnings begin at this part of the limit.
_FIRST_WARNING = 0.1
_NAMED = 8
#: From here on tenths of a second are not told.
_WHOLE = 10


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds without progress that end the job: once a step was made, and before (0: never).  Warnings of both come
    by the first."""

    heartbeat: float
    startup: float

    def end(self, *, begun: bool) -> float:
        """Return the limit that holds now."""
        return (self.heartbeat if begun else self.startup) or inf

    def warning(self, *, begun: bool) -> float:
        """Return from when on a rank is late: not before a silent one can be told from one that waits."""
        return max(_FIRST_WARNING * min(self.heartbeat, self.end(begun=begun)), self.patience + self.interval)

    @property
    def interval(self) -> float:
        """How often to look, seconds: a limit is met within a twentieth."""
        return max(0.05, min(5.0, self.heartbeat / 20, (self.startup or inf) / 20))

    @property
    def patience(self) -> float:
        """Seconds after which a rank that says nothing is silent."""
        return max(1.0, 4 * self.interval)


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of a rank.  waits: inside a collective; begun: it made a step; still: seconds since it went on,
    silent: since it was heard (inf: never)."""

    rank: int
    host: str
    phase: str
    waits: bool
    begun: bool
    still: float
    silent: float = 0.0

    def told(self, *, silent: bool) -> str:
        """Return it in words."""
        name = f"rank {self.rank}/{self.host}"
        if silent:
            return f"{name} has not answered for {_told(self.silent)}, last heard in '{self.phase}'"
        how = "has waited for other ranks" if self.waits else "has not gone on"
        return f"{name} {how} for {_told(self.still)} in '{self.phase}'"


@dataclass(frozen=True, slots=True)
class Stall:
    """The job has not gone on for `seconds`, because of `culprits`; begun: the limit is that of a job that made a step;
    silent: they do not answer."""

    seconds: float
    culprits: tuple[Seen, ...]
    begun: bool
    silent: bool = False

    def told(self) -> str:
        """Return who holds up whom, in words."""
        names = [one.told(silent=self.silent) for one in self.culprits[:_NAMED]]
        if len(self.culprits) > _NAMED:
            names.append(f"{len(self.culprits) - _NAMED} more")
        everybody = len(self.culprits) > 1 and not self.silent and all(one.waits for one in self.culprits)
        return ("all ranks wait for each other: " if everybody else "") + "; ".join(names)


def judge(seen: Sequence[Seen], patience: float) -> Stall | None:
    """Return who holds the job up and for how long by now, None where that cannot be known.

    Of who stands still for much shorter than another it is not said.
    """
    heard = [one for one in seen if one.silent <= patience]
    busy = [one for one in heard if not one.waits]
    if busy:
        worst = max(busy, key=lambda one: one.still)
        return Stall(worst.still, tuple(one for one in busy if one.still >= worst.still / 2), worst.begun)
    if not heard or any(one.silent == inf for one in seen):
        return None
    lost = tuple(one for one in seen if one.silent > patience)
    begun = any(one.begun for one in seen)
    return Stall(min(one.still for one in heard), lost or tuple(heard), begun, silent=bool(lost))


def _told(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= _WHOLE else f"{seconds:.1f} s"


class Alarm:
    """Decides when a stall is worth a line: once for each phase and rank, then at growing intervals."""

    def __init__(self) -> None:
        self._about: tuple[tuple[int, str], ...] = ()
        self._again = 0.0

    def due(self, stall: Stall, first: float) -> bool:
        """Say whether to warn now; first: seconds from which a rank is late."""
        if stall.seconds < first:
            return False
        about = tuple((one.rank, one.phase) for one in stall.culprits)
        if about == self._about and stall.seconds < self._again:
            return False
        self._about, self._again = about, 2 * stall.seconds
        return True
