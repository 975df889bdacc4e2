"""Looks at what earlier attempts left at the output's place, and opens this attempt there (rank 0's matter).

`recovery` decides; here files are read, locked and written.  In two steps: `look` before any weight is loaded, so that
a refusal costs seconds; `begin` after it, so that a job that cannot load leaves nothing behind but what it found.  The
lock is held from the first to the job's end.  An output that is published and goes on becomes an attempt of its own
(`reopen`), so what comes after knows nothing of it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from bgmpi.errors import BgmpiError
from bgmpi.io.attempts import GONE, Attempt, RowMap, alone, begin_attempt, located, next_number, read_attempts, row_maps
from bgmpi.io.collected import Collected, begun, collect, counting
from bgmpi.io.publish import remove_parts
from bgmpi.io.published_answers import PublishedAnswers
from bgmpi.io.reopen import FIRST, PublishedRows, published_rows, reopen
from bgmpi.io.results_file import open_results
from bgmpi.io.segments import parts_folder
from bgmpi.prepare import Job
from bgmpi.primitives import Ids
from bgmpi.recovery import Found, Left, Rows, Start, ended_sequences, how_to_start, nothing_left
from bgmpi.report import Summary
from bgmpi.request import Begun

_LOG = logging.getLogger("bgmpi.resume")


@dataclass(frozen=True, slots=True)
class _Published:
    """A published output that goes on."""

    answers: PublishedAnswers
    settings: Mapping[str, str]
    rows: PublishedRows


@dataclass(slots=True)
class Resumption:
    """This attempt: its number, and how it begins.

    maps: how answers of every attempt, this one too, count; left: what earlier ones left; elapsed: seconds of the job
    that they took; summary: of the whole job, where nothing is left to do; published: the output that goes on.
    """

    number: int
    start: Start
    left: Left
    maps: dict[int, RowMap]
    elapsed: float = 0.0
    summary: Summary | None = None
    published: _Published | None = None


def look(job: Job, environ: Mapping[str, str], stack: ExitStack) -> Resumption:
    """Decide how this attempt begins, and read what it goes on with.  Rank 0.

    Raises UsageError where only the user can decide, or another job writes this output.
    """
    assert job.index is not None
    config = job.config
    folder = parts_folder(config.output_file)
    if folder.is_dir():
        _lock(folder, stack)
    attempts, damaged = read_attempts(folder)
    found, rows = _found(job, attempts)
    requeued = environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")
    start = how_to_start(
        found, job.settings(), resume=config.resume, overwrite=config.overwrite, requeued=requeued,
        retry_failed=config.retry_failed,
    )
    first = job.index.first_sequence()
    match start:
        case Start.NOTHING:
            _LOG.info("%s holds the whole answer to this job: nothing is left to do", config.output_file)
            remove_parts(folder)  # what a kill left of them
            return Resumption(0, start, nothing_left(0), {}, summary=_summary(Path(config.output_file)))
        case Start.FRESH:
            return Resumption(FIRST, start, nothing_left(int(first[-1])), {})
        case Start.REOPEN:
            assert rows is not None and found.settings is not None
            resumption = _reopened(job, found.settings, rows, first)
        case Start.RESUME:
            resumption = _resumed(job, attempts, damaged, first)
    left = resumption.left
    _LOG.info(
        "attempt %d goes on: of %d sequences %d are done, %d are errors, %d are begun with %d tokens",
        resumption.number, len(left.done), int(left.done.sum()), int(left.failed.sum()), len(left.begun),
        sum(len(one.tokens) for one in left.begun.values()),
    )
    return resumption


def begin(job: Job, found: Resumption, stack: ExitStack) -> None:
    """Write down this attempt, in an empty folder where it goes on with no parts.  Rank 0.  Raises WriteError."""
    assert job.index is not None
    folder = parts_folder(job.config.output_file)
    if found.start is not Start.RESUME:
        remove_parts(folder)
        _lock(folder, stack)
    if found.published is not None:
        reopen(found.published.answers, folder, found.published.settings, found.published.rows, found.elapsed)
    begin_attempt(
        folder, found.number, job.settings(), job.index.key, job.index.content,
        retry_failed=job.config.retry_failed,
    )
    found.maps[found.number] = RowMap()


# --- inside ---------------------------------------------------------------------------------------------------------


def _lock(folder: Path, stack: ExitStack) -> None:
    warnings: list[str] = []
    stack.enter_context(alone(folder, warnings))
    for sentence in warnings:
        _LOG.warning("%s", sentence)


def _found(job: Job, attempts: tuple[Attempt, ...]) -> tuple[Found, PublishedRows | None]:
    """Return what lies there, and the rows of the output where they can be told."""
    assert job.index is not None
    path, folder = Path(job.config.output_file), parts_folder(job.config.output_file)
    parts = attempts[-1].settings if attempts else None
    if not path.exists():
        return Found(str(path), str(folder), parts=parts), None
    try:
        with open_results(path) as results:
            settings = msgspec.json.decode(results.document("settings"), type=dict[str, str])
            rows = published_rows(results, job.index)
    except (BgmpiError, msgspec.MsgspecError):
        return Found(str(path), str(folder), exists=True, parts=parts), None
    whole = rows.key == job.index.key
    if rows.content is None:
        return Found(str(path), str(folder), exists=True, settings=settings, parts=parts), None
    kept = np.ones(len(rows.failed), bool) if whole else located(rows.content, job.index.content) != GONE
    count = int(kept.sum())
    meeting = Rows(count, len(job.index) - count, len(kept) - count, int((kept & rows.failed).sum()))
    return Found(str(path), str(folder), True, whole, settings, meeting, parts), rows


def _reopened(job: Job, settings: Mapping[str, str], rows: PublishedRows, first: Ids) -> Resumption:
    """Return the attempt that goes on with a published output."""
    assert job.index is not None and rows.content is not None
    path = Path(job.config.output_file)
    answers = PublishedAnswers(path)
    same = rows.key == job.index.key
    how = RowMap(None if same else located(rows.content, job.index.content), errors=not job.config.retry_failed)
    at, row = counting(answers.row, answers.is_error, how)
    left = Left(*ended_sequences(first, row, answers.sample[at], answers.is_error[at]))
    with open_results(path) as results:
        done = results.column("samples/done")
    seconds = float(done[np.isfinite(done)].max(initial=0.0))
    _LOG.info("%s goes on: it stays as it is until the new one is whole", path)
    published = _Published(answers, settings, rows)
    return Resumption(FIRST + 1, Start.REOPEN, left, {FIRST: how}, seconds, published=published)


def _resumed(job: Job, attempts: tuple[Attempt, ...], damaged: tuple[str, ...], first: Ids) -> Resumption:
    """Return the attempt that goes on with the parts that earlier ones left."""
    assert job.index is not None
    folder = parts_folder(job.config.output_file)
    maps, lost = row_maps(folder, attempts, job.index.key, job.index.content)
    if job.config.retry_failed:
        maps = {number: RowMap(how.rows, errors=False) for number, how in maps.items()}
    collected = collect(folder, maps)
    for sentence in (*damaged, *lost, *collected.damaged, *collected.journal.torn):
        _LOG.warning("%s", sentence)
    elapsed = max((one.seconds for one in (*collected.journal.entries, *collected.journal.progress)), default=0.0)
    return Resumption(next_number(folder), Start.RESUME, _left(maps, collected, first), maps, elapsed)


def _left(maps: Mapping[int, RowMap], collected: Collected, first: Ids) -> Left:
    done, failed = ended_sequences(first, collected.row, collected.sample, collected.is_error)
    unfinished: dict[int, Begun] = {}
    samples = np.diff(first)
    for (row, sample), answer in begun(maps, collected).items():
        sequence = int(first[row]) + sample
        if 0 <= sample < samples[row] and not (done[sequence] or failed[sequence]):
            unfinished[sequence] = Begun(answer.tokens, answer.logprobs, answer.first_token_s)
    return Left(done, failed, unfinished)


def _summary(path: Path) -> Summary:
    """Return what a published file tells of its job."""
    with open_results(path) as results:
        failed = int(results.status.sum())
        generated = int(results.column("samples/completion_tokens").sum())
        prompt = int(results.column("samples/prompt_tokens").sum())
    rows = len(results)
    return Summary(
        rows=rows, done=rows - failed, failed=failed, prompt_tokens=prompt, generated_tokens=generated, seconds=0.0,
        ranks=0, steps=0, outputs={"results": str(path)},
    )

