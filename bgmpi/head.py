"""Rank 0's part of the job beside its own sequences: read ahead, decide, watch, and publish at the end.

The decisions are the scheduler's; this is the deed around it: what it hears is collected, what it says is packed for
every rank with the requests that it speaks of, and both go to the trace.
"""

from __future__ import annotations

import logging
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from msgspec import Struct

from bgmpi.coroutine import State
from bgmpi.drill import Drill
from bgmpi.fairness import Wishes
from bgmpi.intake import Intake
from bgmpi.io.openai_lines import export_errors
from bgmpi.io.outcome import read_outcome
from bgmpi.io.publish import Published, publish, remove_parts
from bgmpi.io.segments import parts_folder
from bgmpi.prepare import Job
from bgmpi.primitives import NOBODY, Admit, Event, Instruction, Refused, Reported, Restored, StopAsked
from bgmpi.rank import Work
from bgmpi.report import Snapshot, Summary, progress_of
from bgmpi.request import Answer
from bgmpi.resume import Resumption
from bgmpi.scheduler import Rules, Scheduler
from bgmpi.stop_rules import StopRules
from bgmpi.tally import Counts
from bgmpi.tokenising import Prompts
from bgmpi.trace import TraceWriter

#: Rounds of which the longest is taken for how long the next may last.
_LAST_ROUNDS = 8
_LOG = logging.getLogger("bgmpi.head")


class Orders(Struct):
    """What one rank gets in one round: instructions, the work that its `Admit`s speak of, and the shared prefixes to
    which no further sequence of the job will come."""

    instructions: list[Instruction]
    work: list[Work]
    closed: list[int] = []


class Head:
    """The job as rank 0 sees it.

    attempt: how this one begins; pool: tokens of KV of the smallest rank; refuse: takes rows that never run;
    stop_rules: when the job stops before its end; prompts: those of the job, where they are tokenised already.
    """

    def __init__(
        self,
        job: Job,
        ranks: int,
        rules: Rules,
        *,
        attempt: Resumption,
        pool: int,
        clock: Callable[[], float],
        refuse: Callable[[Answer], None],
        stop_rules: StopRules,
        stack: ExitStack,
        prompts: Prompts | None = None,
    ) -> None:
        assert job.index is not None
        config = job.config
        self._job = job
        self._attempt = attempt
        self._ranks = ranks
        self._clock = clock
        self._reader = stack.enter_context(job.reader(job.index))
        self._intake = Intake(
            self._reader,
            job.index.first_sequence(),
            left=attempt.left,
            context=job.context,
            pool=pool,
            strict=config.strict,
            clock=clock,
            refuse=refuse,
            wishes=Wishes(job.index.priority, job.index.deadline, config.ageing),
            prompts=prompts,
        )
        self._scheduler = Scheduler(self._intake.sequences, ranks, rules, Drill.parse(config.drill))
        self._trace = stack.enter_context(TraceWriter(config.trace)) if config.trace else None
        metrics = None
        if config.metrics_file:
            metrics = stack.enter_context(open(config.metrics_file, "a", encoding="utf-8"))  # noqa: SIM115 - the stack closes it
        columns = shutil.get_terminal_size((120, 24)).columns
        self._progress = progress_of(config, sys.stderr, metrics=metrics, columns=columns)
        stack.callback(self._progress.close)
        self._stop_rules = stop_rules
        self._decided: deque[float] = deque(maxlen=_LAST_ROUNDS)
        self._failed = np.zeros(self._intake.rows, bool)
        self._faults = np.zeros(self._intake.rows, bool)
        self._wasted = self._reused = self._thin = self._full = 0
        self._now = Snapshot(0, 0, self._intake.sequences, 0, 0, 0, 0, 0, 0, 0, 0.0, 0)

    def decide(self, reports: list[Reported]) -> list[Orders]:
        """Turn one round's reports into every rank's orders."""
        scheduler = self._scheduler
        self._intake.learn(report.answered for report in reports)
        room = sum(report.slots_free for report in reports)
        wanted = scheduler.wanted() if scheduler.round_number else 2 * room
        events: list[Event] = [*reports, *self._intake.read(wanted)]
        events += self._wishes_to_stop(reports, events)
        said = scheduler.handle(events)
        if self._job.config.check:
            scheduler.check()
        if self._trace is not None:
            self._trace.round(scheduler.round_number, self._clock(), events, said)
        self._watch(reports)
        work = [self._work(one) for one in said]
        closed = self._intake.take_closed()
        return [Orders(one, mine, closed) for one, mine in zip(said, work, strict=True)]

    def stop(self, why: str) -> None:
        """Show the last line of progress of a job that stops before its end, and why."""
        self._progress.show(replace(self._now, seconds=self._clock()), last=True)
        _LOG.warning("stopped: %s", why)

    def publish(self, beat: Callable[[], None]) -> Published:
        """Merge all segments into the output file, calling `beat` after each piece.  Raises WriteError; the segments
        stay until it is whole."""
        job = self._job
        assert job.index is not None
        layout: dict[str, int | str] = {
            "ranks": self._ranks,
            "page_tokens": job.config.page_tokens,
            "dtype": str(job.dtype).removeprefix("torch."),
        }
        folder = parts_folder(job.config.output_file)
        published = publish(
            folder,
            Path(job.config.output_file),
            job.provenance(layout),
            len(job.index),
            job.index.samples,
            prompts_per_row=job.index.prompts,
            content=job.index.content,
            maps=self._attempt.maps,
            beat=beat,
        )
        if job.config.error_file is not None:
            export_errors(published.path, job.config.error_file)
        remove_parts(folder)
        return published

    def summarise(self, counts: Counts, published: Published, loaded: float) -> Summary:
        """Return the summary and show the last line of progress."""
        self._progress.show(replace(self._now, seconds=self._clock()), last=True)
        routed, index = counts.routed, self._job.index
        assert index is not None
        outcome = read_outcome(published.path, index.priority, index.deadline)
        outputs = {"results": str(published.path)}
        if self._job.config.error_file is not None:
            outputs["errors"] = self._job.config.error_file
        return Summary(
            rows=published.rows,
            done=published.done,
            failed=published.errors,
            prompt_tokens=self._now.prompt_tokens,
            generated_tokens=self._now.generated_tokens,
            seconds=self._clock(),
            ranks=self._ranks,
            steps=self._now.steps,
            load_seconds=loaded,
            preemptions=self._now.preemptions,
            wasted_tokens=self._wasted,
            reused_tokens=self._reused,
            thin_steps=self._thin,
            full_steps=self._full,
            outcome=outcome,
            expert_tokens_mean=float(routed.mean()) if len(routed) else None,
            expert_tokens_max=float(routed.max()) if len(routed) else None,
            migrated=counts.moves.migrated,
            partitioned=counts.moves.partitioned,
            moved_bytes=counts.moves.moved_bytes,
            spilled_bytes=counts.moves.spilled_bytes,
            outputs=outputs,
            samples=[(self._reader.shown_prompt(row), text) for row, text in outcome.shown],
        )

    # --- inside ---------------------------------------------------------------------------------------------------

    def _wishes_to_stop(self, reports: list[Reported], events: list[Event]) -> list[StopAsked]:
        """Return what the rules for stopping say of this moment."""
        now = time.time()
        self._decided.append(now)
        longest = max((later - earlier for earlier, later in pairwise(self._decided)), default=0.0)
        wishes = [self._stop_rules.near_the_end(now, longest)]
        faults = [move.sequences for one in reports for move in one.moves if move.state == State.FAILED]
        refused = [event.sequences for event in events if isinstance(event, Refused)]
        refused += [event.failed for event in events if isinstance(event, Restored)]
        if faults or refused:
            self._faults[self._intake.rows_of(np.concatenate((NOBODY, *faults)))] = True
            self._failed[self._intake.rows_of(np.concatenate((NOBODY, *faults, *refused)))] = True
            failed, computed = int(self._failed.sum()), int(self._faults.sum())
            wishes.append(self._stop_rules.too_many_errors(failed, self._intake.rows, computed))
        return [wish for wish in wishes if wish is not None]

    def _work(self, instructions: list[Instruction]) -> list[Work]:
        return [work for one in instructions if isinstance(one, Admit) for work in self._intake.take(one.sequences)]

    def _watch(self, reports: list[Reported]) -> None:
        counts = self._scheduler.table.counts
        pages = sum(report.pool_pages for report in reports)
        yields = sum(len(m.sequences) for report in reports for m in report.moves if m.state == State.YIELDED)
        self._wasted += sum(report.wasted_tokens for report in reports)
        self._reused += sum(report.reused_tokens for report in reports)
        self._thin += sum(report.thin_steps for report in reports)
        self._full += sum(report.full_steps for report in reports)
        self._now = Snapshot(
            done=int(counts[State.DONE]),
            failed=int(counts[State.FAILED]),
            total=self._intake.sequences,
            active=int(counts[State.ACTIVE]),
            waiting=int(counts[State.WAITING] + counts[State.YIELDED]),
            prompt_tokens=self._now.prompt_tokens + sum(report.prompt_tokens for report in reports),
            generated_tokens=self._now.generated_tokens + sum(report.generated_tokens for report in reports),
            kv_used=pages - sum(report.free_pages for report in reports),
            kv_pages=pages,
            preemptions=self._now.preemptions + yields,
            seconds=self._clock(),
            steps=self._now.steps + max(report.steps for report in reports),
        )
        self._progress.show(self._now)
