"""Decides when a job stops before its end without being told to: the wall time is near, or too many rows have failed.

Pure: times and counts in, an event for the scheduler out.  Either way all that ranks have is saved, so going on later
costs nothing but a start.
"""

from __future__ import annotations

from dataclasses import dataclass

from bgmpi.errors import ExitCode
from bgmpi.primitives import StopAsked
from bgmpi.values import error_allowance


@dataclass(frozen=True, slots=True)
class StopRules:
    """When to stop.

    wall_end: seconds since the epoch at which the batch system ends the job, None when it does not; margin: seconds
    before it at which the job should have its last boundary; max_errors: as the option says it, None for no limit.
    """

    wall_end: float | None = None
    margin: float = 0.0
    max_errors: str | None = None

    def near_the_end(self, now: float, round_seconds: float) -> StopAsked | None:
        """Return the wish to stop when another round might end too late.

        now: seconds since the epoch; round_seconds: the longest of the last rounds.
        """
        if self.wall_end is None or self.margin <= 0 or now + round_seconds + self.margin < self.wall_end:
            return None
        left = max(0.0, self.wall_end - now)
        return StopAsked(f"the wall time ends in {left:.0f} s (--stop-before-walltime)", ExitCode.STOPPED)

    def too_many_errors(self, failed: int, rows: int, faults: int) -> StopAsked | None:
        """Return the wish to stop when more rows have failed than may.

        failed: error rows of `rows`; faults: how many of them the ranks met while computing.  The exit code says whose
        fault most of them are: the model's, or the input's.
        """
        if self.max_errors is None:
            return None
        allowed, share = error_allowance(self.max_errors)
        if failed <= (allowed * rows / 100 if share else allowed):
            return None
        code = ExitCode.INTERNAL if 2 * faults > failed else ExitCode.INPUT
        return StopAsked(
            f"{failed} of {rows} rows have failed, {faults} of them while they were computed; --max-errors "
            f"{self.max_errors} allows fewer. See their error codes with `bgmpi inspect` or --error-file after a run "
            "with a higher --max-errors, or mend the cause and run again with --retry-failed",
            code,
        )
