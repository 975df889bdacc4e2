"""What every rank did and when, from a trace: lanes of pieces of time, and sums of seconds, sequences and bytes.

The paper's claim is that ranks stay even and busy (A5, A6), and a picture shows at a glance where they do not.  This
file makes the numbers of that picture, `picture.py` paints it; neither knows how a decision was made.

A trace may hold millions of deeds and a picture has about a thousand columns, so the trace is read twice: once for its
extent and exact sums, once for pieces, which join their neighbour of the same kind while both fit into one column.
Memory is bounded by the picture and not by the trace.  Idle is what no deed covers between the first deed of the job
and the last one; deeds may lie inside each other (a spill within a run) and count once.

Rejected: keeping every deed as an object and sorting them, which needs gigabytes for a long job.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from bgmpi.trace import EVENTS, DeedLine, read_deeds, read_trace

#: In the order in which they are drawn and told; kinds that are not named here follow behind.
KINDS = ("run", "combine", "yield", "migrate", "partition", "spill")
#: At most so many pieces over all lanes, and within that so many columns of time.
MOST_PIECES = 200_000
MOST_COLUMNS = 1100
FEWEST_COLUMNS = 50
TOLD_RANKS = 32


@dataclass(slots=True)
class Piece:
    """One or more deeds of a rank that are drawn as one: from `begin` to `end`, seconds of the job's clock, of which
    `busy` were spent in its `deeds` deeds."""

    begin: float
    end: float
    busy: float = 0.0
    deeds: int = 0
    sequences: int = 0
    bytes: int = 0

    def take(self, deed: DeedLine) -> None:
        """Add one deed."""
        self.end = max(self.end, deed.time + deed.seconds)
        self.busy += deed.seconds
        self.deeds += 1
        self.sequences += len(deed.sequences)
        self.bytes += deed.bytes


@dataclass(slots=True)
class Lane:
    """One rank.  pieces: by kind, oldest first; sums: all deeds of a kind as one piece; covered: seconds in which it
    did anything at all."""

    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    sums: dict[str, Piece] = field(default_factory=dict)
    covered: float = 0.0
    _covered_until: float = float("-inf")

    def count(self, deed: DeedLine) -> None:
        """Add a deed to the sums; those of a rank come oldest first."""
        end = deed.time + deed.seconds
        self.sums.setdefault(deed.what, Piece(deed.time, end)).take(deed)
        self.covered += max(0.0, end - max(deed.time, self._covered_until))
        self._covered_until = max(self._covered_until, end)

    def draw(self, deed: DeedLine, column: float) -> None:
        """Add a deed to the pieces; it joins the last one if both fit into `column` seconds, the least drawn."""
        pieces = self.pieces.setdefault(deed.what, [])
        if not pieces or deed.time + deed.seconds - pieces[-1].begin > column:
            pieces.append(Piece(deed.time, deed.time))
        pieces[-1].take(deed)


@dataclass(slots=True)
class Timeline:
    """All ranks, from the `begin` of the first deed to the `end` of the last one.  events: sequences by event."""

    name: str
    begin: float
    end: float
    lanes: list[Lane]
    events: Counter[str]

    @property
    def seconds(self) -> float:
        """From the first deed to the last."""
        return self.end - self.begin

    @property
    def kinds(self) -> list[str]:
        """The kinds of deeds that occur; a run always does."""
        found = {kind for lane in self.lanes for kind in lane.sums}
        return [kind for kind in KINDS if kind in found or kind == "run"] + sorted(found - set(KINDS))

    def idle(self, lane: Lane) -> float:
        """Return the seconds in which the rank of `lane` did nothing."""
        return max(0.0, self.seconds - lane.covered)


def read_timeline(path: str | Path) -> Timeline:
    """Return the timeline of a trace; raises InputError when the file is not a trace of this version."""
    timeline = Timeline(Path(path).name, float("inf"), float("-inf"), [Lane() for _ in range(_ranks(path))], Counter())
    lines = 0
    for line in read_deeds(path):
        lines += 1
        if line.what in EVENTS:
            timeline.events[line.what] += len(line.sequences)
            continue
        while line.rank >= len(timeline.lanes):
            timeline.lanes.append(Lane())
        timeline.lanes[line.rank].count(line)
        timeline.begin = min(timeline.begin, line.time)
        timeline.end = max(timeline.end, line.time + line.seconds)
    if timeline.begin > timeline.end:
        timeline.begin = timeline.end = 0.0
    column = timeline.seconds / _columns(timeline)
    # A job that still runs may have written more lines by now.
    for line in islice(read_deeds(path), lines):
        if line.what not in EVENTS:
            timeline.lanes[line.rank].draw(line, column)
    return timeline


def table(timeline: Timeline) -> list[list[str]]:
    """Return seconds, deeds and bytes by rank and kind as rows of words, the first one their heads."""
    kinds = timeline.kinds
    rows = [["rank", "idle", *kinds]]
    for rank, lane in enumerate(timeline.lanes):
        rows.append([str(rank), _share(timeline.idle(lane), timeline.seconds), *(_sum(lane, kind) for kind in kinds)])
    if len(timeline.lanes) > 1:
        everyone = _together(timeline)
        idle = sum(timeline.idle(lane) for lane in timeline.lanes)
        total = _share(idle, timeline.seconds * len(timeline.lanes))
        rows.append(["all", total, *(_sum(everyone, kind) for kind in kinds)])
    return rows


def summary(timeline: Timeline) -> str:
    """Return the timeline in words: its extent, what became of sequences, the table (of the first ranks and all)."""
    ranks = len(timeline.lanes)
    lines = [f"{timeline.name}: {ranks} {'rank' if ranks == 1 else 'ranks'}, "
             f"{timeline.begin:.3f} s to {timeline.end:.3f} s of the job"]
    if timeline.events:
        counts = (f"{count:,} {name}" for name, count in timeline.events.items() if count)
        lines.append("  sequences: " + ", ".join(counts))
    rows = table(timeline)
    if ranks > TOLD_RANKS:
        rows = [*rows[: TOLD_RANKS + 1], ["...", *[""] * (len(rows[0]) - 1)], rows[-1]]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines += ["  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def seconds_text(seconds: float) -> str:
    """Spell a duration in s, ms or us."""
    if seconds >= 1 or seconds == 0:
        return f"{seconds:.4g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def bytes_text(size: int) -> str:
    """Spell a number of bytes in B, kB, MB or GB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size} B"


# --- inside ---------------------------------------------------------------------------------------------------------


def _ranks(path: str | Path) -> int:
    first = next(read_trace(path), None)
    return len(first.instructions) if first is not None else 0


def _columns(timeline: Timeline) -> int:
    lanes = max(1, len(timeline.lanes) * len(timeline.kinds))
    return min(MOST_COLUMNS, max(FEWEST_COLUMNS, MOST_PIECES // lanes))


def _together(timeline: Timeline) -> Lane:
    everyone = Lane()
    for lane in timeline.lanes:
        for kind, one in lane.sums.items():
            total = everyone.sums.setdefault(kind, Piece(one.begin, one.end))
            total.busy += one.busy
            total.deeds += one.deeds
            total.sequences += one.sequences
            total.bytes += one.bytes
    return everyone


def _sum(lane: Lane, kind: str) -> str:
    one = lane.sums.get(kind)
    if one is None:
        return "-"
    return f"{seconds_text(one.busy)} in {one.deeds:,}" + (f", {bytes_text(one.bytes)}" if one.bytes else "")


def _share(part: float, whole: float) -> str:
    return seconds_text(part) + (f" ({part / whole:.0%})" if whole else "")
