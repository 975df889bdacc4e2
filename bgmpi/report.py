"""Turns numbers into words: the live bar, the line a log gets, the metrics line, and the last page of a job.

Everything here but `Progress.show` is pure: a snapshot in, text out.  What it refuses to know: where the numbers come
from, and what time it is (a snapshot carries its own seconds since the job began).

A bar belongs on a terminal only; in a log it is one line an interval, without carriage returns, so that launchers that
prefix lines stay readable (conventions, "Logs").  The bar leaves the cursor at the start of its line, so a line of the
log simply writes over it.
"""

from __future__ import annotations

import json
import logging
import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TextIO

from bgmpi.config import Config
from bgmpi.io.outcome import Outcome

ERASE_LINE = "\x1b[2K"
BAR_SECONDS = 0.2
BAR_CELLS = 20


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The whole job at one moment.

    Rows: done (good), failed, total (None while the input is still being read), waiting.  active: live sequences.
    prompt_tokens, generated_tokens: computed so far.  kv_used of kv_pages: pages over all ranks.  preemptions,
    steps: so far.  seconds: since the job began.
    """

    done: int
    failed: int
    total: int | None
    active: int
    waiting: int
    prompt_tokens: int
    generated_tokens: int
    kv_used: int
    kv_pages: int
    preemptions: int
    seconds: float
    steps: int


@dataclass(frozen=True, slots=True)
class Summary:
    """What a job came to.  `failed` is the same on every rank, because the exit code follows from it; the rest is
    rank 0's to know.  ranks is 0 where nothing had to be done.

    seconds: from start to last row, load_seconds of it for loading weights. wasted_tokens: computed again because a
    yield had dropped their KV. reused_tokens: of prompts, computed once for several sequences. thin_steps: with less
    than half of the tokens that a step may have while sequences waited, full_steps: those of them for which KV memory
    was the limit. migrated: moves of sequences to another rank, moved_bytes of KV copied for them;
    partitioned: times that a sequence was spread over ranks; spilled_bytes: KV written to disk. outcome: what the
    answers tell, of all attempts; None where nothing was published. expert_tokens_mean, expert_tokens_max: tokens
    an expert computed over the job, None for a dense model. outputs: name -> path. samples: (prompt text, answer
    text).
    """

    rows: int
    done: int
    failed: int
    prompt_tokens: int
    generated_tokens: int
    seconds: float
    ranks: int
    steps: int
    load_seconds: float = 0.0
    preemptions: int = 0
    wasted_tokens: int = 0
    reused_tokens: int = 0
    thin_steps: int = 0
    full_steps: int = 0
    migrated: int = 0
    partitioned: int = 0
    moved_bytes: int = 0
    spilled_bytes: int = 0
    outcome: Outcome | None = None
    expert_tokens_mean: float | None = None
    expert_tokens_max: float | None = None
    outputs: dict[str, str] = field(default_factory=dict)
    samples: list[tuple[str, str]] = field(default_factory=list)


def clock(seconds: float) -> str:
    """Spell a duration as 0:07, 12:30 or 1:02:03; --:-- when it is not known."""
    if not 0 <= seconds < 1e9:
        return "--:--"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def rate(amount: float, seconds: float) -> float:
    """Return amount per second, 0 where no time has passed."""
    return amount / seconds if seconds > 0 else 0.0


def eta(snapshot: Snapshot) -> float:
    """Return the seconds left at the mean pace so far, infinity when it cannot be known."""
    ended = snapshot.done + snapshot.failed
    if snapshot.total is None or (ended == 0 and snapshot.total):
        return float("inf")
    return (snapshot.total - ended) * snapshot.seconds / ended if ended else 0.0


def line(now: Snapshot, before: Snapshot | None = None) -> str:
    """Return the progress line; rates are those since `before`, or since the start."""
    seconds = now.seconds - (before.seconds if before else 0.0)
    prompt = rate(now.prompt_tokens - (before.prompt_tokens if before else 0), seconds)
    output = rate(now.generated_tokens - (before.generated_tokens if before else 0), seconds)
    used = now.kv_used / now.kv_pages if now.kv_pages else 0.0
    total = "?" if now.total is None else now.total
    return (
        f"{now.done + now.failed}/{total} rows, {now.failed} failed, {now.active} active, {now.waiting} waiting | "
        f"prompt {prompt:.0f} tok/s, output {output:.0f} tok/s | KV {used:.0%}, {now.preemptions} preempted | "
        f"{clock(now.seconds)} elapsed, ETA {clock(eta(now))}"
    )


def bar(now: Snapshot, before: Snapshot | None = None, columns: int = 120) -> str:
    """Return the progress line with a bar before it, cut to `columns`."""
    share = min(1.0, (now.done + now.failed) / now.total) if now.total else 0.0
    full = round(share * BAR_CELLS)
    return f"[{'#' * full}{'.' * (BAR_CELLS - full)}] {line(now, before)}"[: columns - 1]


def metrics_line(now: Snapshot, before: Snapshot | None = None) -> str:
    """Return the snapshot and its rates as one JSON object; an unknown ETA is null."""
    seconds = now.seconds - (before.seconds if before else 0.0)
    left = eta(now)
    return json.dumps({
        **asdict(now),
        "prompt_tokens_per_s": rate(now.prompt_tokens - (before.prompt_tokens if before else 0), seconds),
        "generated_tokens_per_s": rate(now.generated_tokens - (before.generated_tokens if before else 0), seconds),
        "eta_seconds": left if left < float("inf") else None,
    })


class Progress:
    """Shows snapshots as they come: on rank 0 only, and never more often than is useful.

    The engine calls `show` whenever it likes, once a round, and `close` at the end.
    """

    def __init__(self, mode: str, interval: float, stream: TextIO, log: Callable[[str], None], *,
                 metrics: TextIO | None = None, columns: int = 120) -> None:
        """Keep where to write.  mode: Config.progress; interval: seconds between two lines (of log and metrics)."""
        self.mode = ("bar" if stream.isatty() else "lines") if mode == "auto" else mode
        self._interval = interval
        self._stream = stream
        self._log = log
        self._metrics = metrics
        self._columns = columns
        self._drawn: Snapshot | None = None
        self._told: Snapshot | None = None
        self._bar_open = False

    def show(self, now: Snapshot, *, last: bool = False) -> None:
        """Show `now` if it is due; the `last` one always is, and ends the bar with a newline."""
        before = self._told
        due = last or now.seconds - (before.seconds if before else 0.0) >= self._interval
        if self.mode == "bar" and (last or self._drawn is None or now.seconds - self._drawn.seconds >= BAR_SECONDS):
            self._stream.write(f"{ERASE_LINE}{bar(now, None if last else before, self._columns)}\r")
            self._stream.flush()
            self._bar_open = True
            self._drawn = now
        if due and self.mode == "lines":
            self._log(line(now, None if last else before))
        if due and self._metrics is not None:
            self._metrics.write(metrics_line(now, None if last else before) + "\n")
            self._metrics.flush()
        if due:
            self._told = now
        if last:
            self.close()

    def close(self) -> None:
        """End an open bar with a newline.  May be called twice."""
        if self._bar_open:
            self._stream.write("\n")
            self._stream.flush()
            self._bar_open = False


def progress_of(config: Config, stream: TextIO, *, metrics: TextIO | None = None, columns: int = 120) -> Progress:
    """Return the progress that `config` asks for, its lines going to the log of this program."""
    log = logging.getLogger("bgmpi.progress")
    return Progress(config.progress, config.log_interval, stream, log.info, metrics=metrics, columns=columns)


def summary_text(summary: Summary, width: int = 100) -> str:
    """Return the last page: counts, rates, where the outputs are, and a few prompts with their answers."""
    blocks = [_samples(summary, width), _table(summary)]
    return "\n\n".join(block for block in blocks if block)


def _table(s: Summary) -> str:
    tokens = s.prompt_tokens + s.generated_tokens
    facts = [
        ("rows", f"{s.rows}: {s.done} good, {s.failed} failed"),
        *(_ends(s.outcome) if s.outcome is not None else ()),
        ("tokens", f"{tokens:,}: {s.prompt_tokens:,} prompt, {s.generated_tokens:,} generated"
         + (f"; {s.wasted_tokens:,} computed twice" if s.wasted_tokens else "")
         + (f"; {s.reused_tokens:,} of prompts shared" if s.reused_tokens else "")),
        ("time", f"{s.seconds:.1f} s, of it {s.load_seconds:.1f} s loading; {s.steps:,} steps on {s.ranks} "
         f"{'rank' if s.ranks == 1 else 'ranks'}" + (f"; {s.preemptions} preemptions" if s.preemptions else "")
         if s.ranks else ""),
        ("moves", _moves(s)),
        ("speed", _speed(s) if s.ranks else ""),
        *(_times(s.outcome) if s.outcome is not None else ()),
        ("expert load", _load(s)),
        *sorted(s.outputs.items()),
    ]
    shown = [(name, value) for name, value in facts if value]
    widest = max(len(name) for name, _ in shown)
    return "\n".join(f"{name:<{widest}}  {value}" for name, value in shown)


def _ends(outcome: Outcome) -> list[tuple[str, str]]:
    capped = outcome.default_capped
    return [
        ("finish", _counts(outcome.finish)),
        ("errors", _counts(outcome.errors)),
        ("hidden caps", f"{capped} samples ended at a length that their request did not set" if capped else ""),
    ]


def _times(outcome: Outcome) -> list[tuple[str, str]]:
    last, late = outcome.last_first, outcome.late
    facts = [
        ("sequence", f"completed in {_spread(*outcome.sct)}" if outcome.sct[0] == outcome.sct[0] else ""),
        ("last begun", f"with its first token {last:.1f} s after the job began" if last == last else ""),
    ]
    for one in outcome.classes:
        known = f", answered {_spread(one.p50, one.p95, one.p99)} after the job began" if one.p50 == one.p50 else ""
        facts.append((f"priority {one.priority}", f"{one.rows:,} rows{known}"))
    if outcome.more_classes:
        facts.append(("priority", f"{outcome.more_classes:,} less urgent ones"))
    if outcome.in_time or late:
        facts.append(("deadlines", f"{outcome.in_time:,} rows in time, {late:,} late"))
    return facts


def _spread(p50: float, p95: float, p99: float) -> str:
    return f"{p50:.1f} s (half), {p95:.1f} s (95 %), {p99:.1f} s (99 %)"


def _speed(s: Summary) -> str:
    working = s.seconds - s.load_seconds
    total = rate(s.prompt_tokens + s.generated_tokens, working)
    output = rate(s.generated_tokens, working)
    return f"{total:,.0f} tok/s, of it {output:,.0f} generated ({output / s.ranks:,.0f} a rank)"


def _moves(s: Summary) -> str:
    facts = [
        f"{s.migrated:,} migrated ({s.moved_bytes / 1e6:,.1f} MB copied)" if s.migrated or s.moved_bytes else "",
        f"{s.partitioned:,} partitioned" if s.partitioned else "",
        f"{s.spilled_bytes / 1e6:,.1f} MB spilled to disk" if s.spilled_bytes else "",
    ]
    return ", ".join(fact for fact in facts if fact)


def _load(s: Summary) -> str:
    if s.expert_tokens_mean is None or s.expert_tokens_max is None or not s.expert_tokens_mean:
        return ""
    skew = s.expert_tokens_max / s.expert_tokens_mean
    return f"{s.expert_tokens_mean:,.0f} tokens an expert on average, the busiest {skew:.2f} times that"


def _counts(counts: dict[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count} {name}" for name, count in ordered if count)


def _samples(s: Summary, width: int) -> str:
    return "\n\n".join(
        f"{_wrapped('> ', prompt, width, 2)}\n{_wrapped('  ', answer, width, 4)}" for prompt, answer in s.samples
    )


def _wrapped(mark: str, words: str, width: int, most: int) -> str:
    """Wrap text to at most `most` lines, white space closed up and characters that would move a cursor left out."""
    plain = "".join(c if c.isprintable() else " " for c in words)
    lines = textwrap.wrap(" ".join(plain.split()), width - len(mark), max_lines=most, placeholder=" ...")
    return "\n".join(mark + one for one in lines or ["(nothing)"])
