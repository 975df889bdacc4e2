"""Lets jobs live through many kills, and counts what each of them cost.

A life is one job: it is started, killed, started again on another number of ranks, killed elsewhere, ..., until a start
runs to its end.  So every resume is itself killed, and one unbroken run is the reference for all.  What a kill left is
read by plain h5py, json and hashlib, never by the program's own readers.  That finished rows are not computed again,
and how much of the unfinished ones is, is seen from outside too: `kill_at` notes every token that any rank ever draws.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).parent))

import h5py
import msgspec
import numpy as np
from fault_matrix import Kill
from kill_at import NOBODY, kill_words, read_notes, tagged
from launch import Ended, launch, mpiexec

Name = tuple[int, int]
#: Steps of a round, and rows that one rank computes at once: small, so that a tiny job has many rounds.
ROUND_STEPS, SLOTS = 4, 3
_MOST_LAUNCHES = 9
#: Seconds that processes of a launch have to be gone after their launcher is.
_GONE = 20.0
_NEXT_RANKS = {1: 2, 2: 4, 4: 1}


@dataclass(frozen=True, slots=True)
class Job:
    """The job of all lives.  first: each row's first sequence; tokens, chosen: what an unbroken run answers, a sample
    each: ids, and log-probabilities where the row asked for them, in input order."""

    model: Path
    requests: Path
    first: list[int]
    tokens: list[list[int]]
    chosen: np.ndarray[Any, Any]


@dataclass(slots=True)
class Outcome:
    """What one kill cost.  struck: it happened; lost: answers that were on the disk and no longer count; doubled:
    answers that count twice; redone: finished answers that were drawn again; tokens: tokens of unfinished ones drawn
    again, most: of one sequence; seconds: from the oldest of them to the kill; end: from the kill until no process was
    left; faults: laws that it broke, in words."""

    kill: Kill
    struck: bool = False
    lost: int = 0
    doubled: int = 0
    redone: int = 0
    tokens: int = 0
    most: int = 0
    seconds: float = 0.0
    end: float = 0.0
    faults: list[str] = field(default_factory=list)


class Start(Protocol):
    """Starts the program under one launcher and waits for its end."""

    def __call__(self, kill: Kill, words: Sequence[str | Path], environment: Mapping[str, str]) -> Ended:
        """Run the words on the ranks and nodes that `kill` names."""


def start_here(kill: Kill, words: Sequence[str | Path], environment: Mapping[str, str]) -> Ended:
    """Start without Slurm."""
    if kill.launcher == "alone":
        return launch(words, env=environment)
    return mpiexec(kill.ranks, words, env=environment)


def live(job: Job, kills: Iterable[Kill], folder: Path, start: Start = start_here) -> list[Outcome]:
    """Make these kills, one after the other, in as few lives as it takes."""
    outcomes: list[Outcome] = []
    queue = deque((kill, True) for kill in kills)
    while queue:
        life = _Life(job, folder / f"life-{len(outcomes)}", start)
        life.root.mkdir(parents=True)
        while len(life.outcomes) < _MOST_LAUNCHES and queue:
            kill, again = queue.popleft()
            outcome = life.launch(kill)
            if outcome.struck:
                continue
            if kill.instant.when != "ms" and again and len(life.outcomes) > 1:  # the job was too near its end
                queue.appendleft((kill, False))
                if not outcome.faults:
                    life.outcomes.pop()
            break
        else:
            last = life.outcomes[-1].kill
            ranks = _NEXT_RANKS[last.ranks] if last.launcher != "alone" else 1
            life.launch(Kill("", last.launcher, ranks, NOBODY, last.instant, nodes=min(last.nodes, ranks)))
        outcomes += [one for one in life.outcomes if one.kill.victim != NOBODY or one.faults]
    return outcomes


def words_of(job: Job, output: Path, interval: float, options: str) -> list[str | Path]:
    """Return the words of `bgmpi run`."""
    return [
        "run", "--model", job.model, "-i", job.requests, "-o", output, "--dtype", "float32", "--check",
        "--checkpoint-interval", str(interval), "--page-tokens", str(ROUND_STEPS), "--max-num-seqs", str(SLOTS),
        "--progress", "off", "--threads", "1", *options.split(),
    ]  # fmt: skip


class _Life:
    """One job, from its first start until it ends.  drawn: the last launch that drew a token, and when."""

    def __init__(self, job: Job, root: Path, start: Start) -> None:
        self.job = job
        self.root = root
        self.output = root / "out" / "out.h5"
        self.outcomes: list[Outcome] = []
        self._start = start
        self._drawn: dict[Name, tuple[int, float]] = {}
        self._struck: list[float] = []

    def launch(self, kill: Kill) -> Outcome:
        """Start the job with a kill in it, and note what came of it."""
        self.output.parent.mkdir(exist_ok=True)
        number, outcome = len(self.outcomes), Outcome(kill)
        self.outcomes.append(outcome)
        notes = self.root / f"notes-{number}"
        notes.mkdir()
        finished = self._finished(outcome)
        at = kill.instant
        before = kill_words(kill.victim, at.site, at.when, at.count)
        ended = self._start(
            kill, [*before, *words_of(self.job, self.output, kill.interval, kill.options)], {"KILL_NOTES": str(notes)}
        )
        gone = _wait_until_gone(str(notes), outcome)
        drawn, struck, shared = read_notes(notes)
        outcome.struck = struck is not None
        self._count_redone(drawn, number, finished, outcome)
        if struck is None:
            self._struck.append(time.time())
            self._check_end(ended, outcome)
        else:
            self._struck.append(struck)
            outcome.end = gone - struck
            for name in shared:
                Path(name).unlink(missing_ok=True)
            self._check_left(kill, ended, finished, outcome)
        if outcome.faults:
            outcome.faults.append(f"{kill}\n{ended}")
        return outcome

    def _count_redone(
        self, drawn: list[tuple[int, int, float]], number: int, finished: set[int], outcome: Outcome
    ) -> None:
        """Charge tokens that are drawn again to the kill of the launch that drew them last."""
        again = {sequence for sequence, _, _ in drawn} & finished
        if again:
            outcome.redone += len(again)
            outcome.faults.append(f"finished sequences {sorted(again)} were computed again")
        of_sequence: dict[int, Counter[int]] = {}
        for sequence, place, seconds in drawn:
            before = self._drawn.get((sequence, place))
            if before is not None and before[0] != number:
                cost = self.outcomes[before[0]]
                cost.tokens += 1
                cost.seconds = max(cost.seconds, self._struck[before[0]] - before[1])
                of_sequence.setdefault(before[0], Counter())[sequence] += 1
            self._drawn[sequence, place] = (number, seconds)
        for launched, counts in of_sequence.items():
            cost = self.outcomes[launched]
            cost.most = max(cost.most, *counts.values())
            # A round is saved at its end; where the interval is longer, seconds tell, and no test depends on them.
            # Who is asked to stop saves what there is.
            allowed = 0 if cost.kill.asks else ROUND_STEPS if not cost.kill.interval else cost.most
            if cost.most > allowed:
                cost.faults.append(f"{cost.kill}: {cost.most} tokens of one sequence were drawn again, {allowed} may "
                                   f"be: {dict(counts)}")  # fmt: skip

    def _finished(self, outcome: Outcome) -> set[int]:
        """Return the sequences whose answers valid segments hold, or the published file."""
        if self.output.exists():
            return set(range(self.job.first[-1]))
        named = list(_named(self.output.with_name("out.h5.parts")))
        twice = [name for name, times in Counter(named).items() if times > 1]
        if twice:
            outcome.doubled += len(twice)
            outcome.faults.append(f"answers that count twice: {twice}")
        first = self.job.first
        return {one for row, sample in set(named) for one in (
            [first[row] + sample] if sample >= 0 else range(first[row], first[row + 1])
        )}  # fmt: skip

    def _check_left(self, kill: Kill, ended: Ended, finished: set[int], outcome: Outcome) -> None:
        """Check what lies there after a kill."""
        if kill.victim.isdigit() and ended.returncode in (0, 2, 3):
            outcome.faults.append(f"a launch with a killed rank ended with {ended.returncode}")
        if kill.asks and ended.returncode not in (3, 75):
            outcome.faults.append(f"a launch that was asked to stop ended with {ended.returncode}, expected 75")
        for path in sorted(self.output.parent.rglob("*.h5")):
            try:
                with h5py.File(path, "r") as file:
                    whole = file.attrs.get("complete", 0) == 1
            except OSError as error:
                outcome.faults.append(f"{path.name} does not open: {error}")
                continue
            if whole and path != self.output:
                outcome.faults.append(f"{path.name} says that it is complete")
        if self.output.exists():
            self._check_answers(outcome)
        lost = finished - self._finished(outcome)
        outcome.lost += len(lost)
        if lost:
            outcome.faults.append(f"answers that were there are gone: {sorted(lost)}")

    def _check_end(self, ended: Ended, outcome: Outcome) -> None:
        """Check a job that has ended by itself."""
        if ended.returncode != 3:  # one row is an error by intention
            outcome.faults.append(f"expected exit code 3, got {ended.returncode}")
        left = sorted(path.name for path in self.output.parent.iterdir())
        if left != [self.output.name]:
            outcome.faults.append(f"expected nothing but the output, found {left}")
        if self.output.exists():
            self._check_answers(outcome)

    def _check_answers(self, outcome: Outcome) -> None:
        with h5py.File(self.output, "r") as file:
            if file.attrs["complete"] != 1:
                outcome.faults.append("the output is published and not complete")
            offsets, values = file["tokens/offsets"][:], file["tokens/values"][:]
            chosen = file["logprobs/chosen"][:]
        tokens = [values[a:b].tolist() for a, b in pairwise(offsets)]
        if tokens != self.job.tokens:
            wrong = [at for at, (a, b) in enumerate(zip(tokens, self.job.tokens, strict=False)) if a != b]
            outcome.lost += max(0, len(self.job.tokens) - len(tokens)) + len(wrong)
            outcome.faults.append(f"{len(tokens)} answers of {len(self.job.tokens)}, other ids in {wrong}")
        if chosen.shape != self.job.chosen.shape or not np.allclose(chosen, self.job.chosen, atol=1e-4, equal_nan=True):
            outcome.faults.append("log-probabilities are not those of an unbroken run")


def _named(folder: Path) -> Iterable[Name]:
    """Yield row and sample of every answer in the segments that a journal names and whose bytes are as written."""
    for journal in sorted(folder.glob("journal-*.jsonl")):
        for line in journal.read_bytes().split(b"\n")[:-1]:
            try:
                entry = json.loads(line)
            except ValueError:  # a rank that wrote half a line and lived on, because the launcher was the victim
                continue
            path = folder / entry["name"]
            if entry["kind"] != "segment" or not path.exists():
                continue
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest() == entry["sha256"]:
                with h5py.File(path, "r") as file:
                    yield from zip(file["samples/row"][:].tolist(), file["samples/sample"][:].tolist(), strict=True)


def _wait_until_gone(notes: str, outcome: Outcome) -> float:
    """Return when the last process of a launch was gone; end those that stay, and tell them."""
    began = time.time()
    while left := list(tagged(notes)):
        if time.time() - began > _GONE:
            outcome.faults.append(f"processes are left {_GONE:g} s after the end: {left}")
            for pid, _ in left:
                os.kill(pid, signal.SIGKILL)
            break
        time.sleep(0.02)
    return time.time()


# --- the table ------------------------------------------------------------------------------------------------------

COLUMNS = ("phase", "launcher", "kills", "lost", "doubled", "finished redone", "tokens redone", "most of one",
           "redone s", "to the end s", "(most)")


def table(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return one line for each phase and launcher, and the sums."""
    phases = list(dict.fromkeys(one.kill.phase for one in outcomes))
    launchers = list(dict.fromkeys(one.kill.launcher for one in outcomes))
    cells = [(phase, name) for phase in phases for name in launchers]
    groups = [(*cell, [one for one in outcomes if (one.kill.phase, one.kill.launcher) == cell]) for cell in cells]
    lines = [_line(phase, name, [one for one in some if one.struck]) for phase, name, some in groups if some]
    return [*lines, _line("all", "", [one for one in outcomes if one.struck])]


def _line(phase: str, launcher: str, some: Sequence[Outcome]) -> dict[str, Any]:
    ends = [one.end for one in some] or [float("nan")]
    values = (
        phase, launcher, len(some), sum(one.lost for one in some), sum(one.doubled for one in some),
        sum(one.redone for one in some), sum(one.tokens for one in some), max((one.most for one in some), default=0),
        round(max((one.seconds for one in some), default=0.0), 2), round(float(np.median(ends)), 2),
        round(max(ends), 2),
    )  # fmt: skip
    return dict(zip(COLUMNS, values, strict=True))


def text(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the table as text."""
    cells = [list(COLUMNS), *([str(line[name]) for name in COLUMNS] for line in lines)]
    widths = [max(len(row[at]) for row in cells) for at in range(len(COLUMNS))]
    left = 2
    return "\n".join(
        "  ".join(cell.ljust(width) if at < left else cell.rjust(width)
                  for at, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in cells
    )  # fmt: skip


def as_json(outcomes: Sequence[Outcome]) -> bytes:
    """Return the table, and every kill."""
    return msgspec.json.format(msgspec.json.encode({"table": table(outcomes), "kills": outcomes}), indent=1)


class _Written(msgspec.Struct):
    kills: list[Outcome]


def main() -> None:
    """Print one table of all files that were written: python fault_lives.py .build/fault-matrix/*.json."""
    read = [msgspec.json.decode(Path(name).read_bytes(), type=_Written) for name in sys.argv[1:]]
    print(text(table([one for written in read for one in written.kills])))


if __name__ == "__main__":
    main()
