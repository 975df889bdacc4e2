"""The kill matrix as data: in which phase of a job's life, at which site, who is killed, on how many ranks.

A phase is one line of `PHASES` with some instants; who can be killed under a launcher is one line of `VICTIMS`.
`kills` multiplies them.  `fault_lives` makes the kills and counts what they cost; nothing here knows how.

A kill at a site is sure to happen, and one that does not is a fault of this table (the site is gone, or the job is too
short for the count).  Kills at random times find what nobody thought of naming.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import numpy as np


@dataclass(frozen=True, slots=True)
class Instant:
    """One instant: `count` calls of `site` in (see kill_at).  lone: only rank 0 passes there."""

    site: str
    when: str
    count: int = 1
    lone: bool = False


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of a job's life.  least: ranks that it needs; options: of the job, so that it has this phase."""

    name: str
    instants: tuple[Instant, ...]
    least: int = 1
    options: str = ""


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill, or another signal.  launcher: alone, mpiexec or slurm; ranks, nodes: of the launch that it ends; victim
    (with its signal), instant: as `kill_at` takes them; options, interval (of checkpoints, seconds): of the job."""

    phase: str
    launcher: str
    ranks: int
    victim: str
    instant: Instant
    options: str = ""
    nodes: int = 1
    interval: float = 0.0

    @property
    def asks(self) -> bool:
        """Whether it only asks the job to stop."""
        return ":" in self.victim

    def __str__(self) -> str:
        where = f"{self.instant.when} {self.instant.count} {self.instant.site}"
        return f"{self.phase}: {self.victim} of {self.ranks} under {self.launcher}, {where}"


def _replace(name: str, when: str, count: int = 1, lone: bool = False) -> Instant:
    """Every file appears by a rename: before it, it is written and not there, after it, it is there and not named."""
    return Instant(f"bgmpi.io.durable:os.replace#{name}", when, count, lone)


def _torn(name: str, count: int = 1, lone: bool = False) -> Instant:
    return Instant(f"bgmpi.io.durable:write_all#{name}", "half", count, lone)


PHASES = (
    Phase("attempt manifest", (
        _replace("rows-", "before", lone=True),
        _torn("attempt-", lone=True),
        _replace("attempt-", "before", lone=True),
        Instant("bgmpi.engine:_open_writer", "before"),
        _replace("attempt-", "after", lone=True),
        Instant("bgmpi.io.journal:JournalWriter.__init__", "after"),
    )),
    Phase("weights loading", (
        Instant("bgmpi.prepare:prepare", "after"),
        Instant("bgmpi.model:Model.__init__", "before"),
        Instant("bgmpi.model:Model.__init__", "after"),
    )),
    Phase("tokenising", (
        Instant("bgmpi.tokenising:PieceReader.read", "before"),
        Instant("bgmpi.tokenising:PieceReader.read", "after"),
        Instant("bgmpi.engine:read_prompts", "after"),
    )),
    Phase("shared prefix", (
        Instant("bgmpi.shared_prefixes:SharedPrefixes.publish", "before"),
        Instant("bgmpi.shared_prefixes:SharedPrefixes.publish", "after"),
        Instant("bgmpi.kv_stream:KvStream.copy_home", "after", 2),
        Instant("bgmpi.rank:Rank.close", "after", 2),
    ), options="--drill yield=2 --checkpoint-kv always"),
    Phase("prefill", (
        Instant("bgmpi.executor:Executor.step", "before"),
        Instant("bgmpi.executor:Executor.step", "after"),
        Instant("bgmpi.rank:Rank.admit", "after"),
    )),
    Phase("decode", (
        Instant("bgmpi.executor:Executor.step", "after", 7),
        Instant("bgmpi.sequence_manager:SequenceManager.commit", "before", 6),
        Instant("bgmpi.rank:Rank.run", "after", 2),
        Instant("bgmpi.rank:Rank.report", "before", 3),
        Instant("bgmpi.engine:_Checkpoint.save_if_due", "before", 2),
    )),
    Phase("yield, combine", (
        Instant("bgmpi.rank:Rank.suspend", "before", 2),
        Instant("bgmpi.rank:Rank.suspend", "after", 2),
        Instant("bgmpi.rank:Rank.resume", "before", 2),
        Instant("bgmpi.rank:Rank.resume", "after", 2),
        Instant("bgmpi.executor:Executor.do_combine", "before", 9),
    ), options="--drill yield=1"),
    Phase("migrate", (
        Instant("bgmpi.rank:migrate", "before", 2),
        Instant("bgmpi.migration:_receive", "before", 3),
        Instant("bgmpi.rank:migrate", "after", 2),
        Instant("bgmpi.io.segments:SegmentWriter.save_progress", "before", 3),
    ), least=2, options="--drill migrate=1"),
    Phase("partition", (
        Instant("bgmpi.rank:shard", "before"),
        Instant("bgmpi.rank:shard", "after"),
        Instant("bgmpi.rank:unshard", "before"),
        Instant("bgmpi.rank:unshard", "after"),
    ), least=2, options="--drill partition=1"),
    Phase("segment not renamed", (
        _torn("segment-"), _replace("segment-", "before"), _torn("segment-", 2), _replace("segment-", "before", 2),
    )),
    Phase("segment not in journal", (
        _replace("segment-", "after"), Instant("bgmpi.io.journal:JournalWriter.append#segment-", "before", 2),
    )),
    Phase("journal line", (
        Instant("bgmpi.io.journal:write_all", "half", 1),
        Instant("bgmpi.io.journal:write_all", "half", 3),
        Instant("bgmpi.io.journal:JournalWriter.append", "after", 2),
    )),
    Phase("progress file", (
        _torn("progress-"),
        _replace("progress-", "before", 2),
        _replace("progress-", "after", 2),
        Instant("bgmpi.io.segments:SegmentWriter.save_progress", "after", 2),
    )),
    Phase("KV checkpoint", (
        Instant("bgmpi.saved_kv:save_kv", "before", 2),
        Instant("bgmpi.io.durable:HdfSink.write", "half", 3),
        _replace(".kv-", "before", 2),
        _replace(".kv-", "after", 2),
        Instant("bgmpi.saved_kv:remove_if_there", "after"),
    ), options="--checkpoint-kv always"),
    Phase("publication", (
        Instant("bgmpi.engine:_finish", "before"),
        Instant("bgmpi.io.publish:_write_block", "before", lone=True),
        Instant("bgmpi.io.publish:HdfSink.write", "half", 5, lone=True),
        _replace("publishing", "before", lone=True),
        _replace("publishing", "after", lone=True),
        Instant("bgmpi.head:remove_parts", "before", lone=True),
        Instant("bgmpi.io.publish:remove_if_there", "after", 1, lone=True),
        Instant("bgmpi.io.publish:remove_if_there", "after", 4, lone=True),
        Instant("bgmpi.engine:_finish", "after"),
    )),
)

#: Who can be killed under a launcher, beside single ranks.  One rank without a launcher has only itself.
VICTIMS = {"alone": (), "mpiexec": ("all", "launcher"), "slurm": ("step", "batch")}
#: Signals that ask: the job stops at a step boundary, everything saved.
SIGNALS = ("TERM", "USR1")
RANDOM = "any time"
#: What random moments are counted from: how long the first step takes says little about the next ones.
_FROM = (("bgmpi.engine:run", "ms"), ("bgmpi.sequence_manager:SequenceManager.commit", "ms"))
_OPTIONS = ("", "--drill yield=1 --checkpoint-kv always", "--drill yield=2,migrate=3,partition=2")


def kills(launcher: str, ranks: int, *, nodes: int = 1, rounds: int = 1, turn: int = 0) -> list[Kill]:
    """Return every phase that so many ranks have, once for each victim, `rounds` times, each time at another instant;
    turn: the place of the first instant to take in a phase."""
    # Rank 0 decides and publishes: two ranks are enough to see what its death does to others.
    victims = [str(ranks - 1), *VICTIMS[launcher], *(["0"] if (launcher, ranks) == ("mpiexec", 2) else [])]
    made = []
    for phase in PHASES:
        turns = count(turn)
        for victim in victims * rounds if ranks >= phase.least else ():
            fitting = [one for one in phase.instants if not (one.lone and victim.isdigit() and victim != "0")]
            instant = fitting[next(turns) % len(fitting)]
            made.append(Kill(phase.name, launcher, ranks, victim, instant, phase.options, nodes))
    return made


def signals(launcher: str, ranks: int, *, nodes: int = 1, turn: int = 0) -> list[Kill]:
    """Return both signals in every phase that so many ranks have, to the last rank and to the first."""
    made = []
    for phase in PHASES:
        instants = [one for one in phase.instants if one.when != "half"]
        for place, (rank, name) in enumerate(zip((ranks - 1, 0), SIGNALS, strict=True), turn):
            fitting = [one for one in instants if not (one.lone and rank)] if ranks >= phase.least else []
            if fitting:
                instant = fitting[place % len(fitting)]
                what = f"{phase.name}, signal"
                made.append(Kill(what, launcher, ranks, f"{rank}:{name}", instant, phase.options, nodes))
    return made


def random_kills(
    launcher: str, ranks: int, number: int, *, seed: int, nodes: int = 1, asks: bool = False
) -> list[Kill]:
    """Return kills at random times, some from a job's start and more from its first token, at random checkpoint
    intervals; asks: signals instead."""
    draw = np.random.default_rng(seed)
    victims = [str(rank) for rank in range(ranks)]
    victims = [f"{one}:{name}" for one in victims for name in SIGNALS] if asks else [*victims, *VICTIMS[launcher]]
    return [
        Kill(
            f"{RANDOM}, signal" if asks else RANDOM, launcher, ranks, str(draw.choice(victims)),
            Instant(*_FROM[int(draw.integers(4)) > 0], int(draw.integers(10, 700))),
            str(draw.choice(_OPTIONS)), nodes,
            float(draw.choice([0.0, 0.1, 0.3])),
        )
        for _ in range(number)
    ]  # fmt: skip
