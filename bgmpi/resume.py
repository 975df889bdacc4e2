"""Looks at what earlier attempts left at the output's place, and opens this attempt there (rank 0's matter).

`recovery` decides; here files are read, locked and written.  In two steps: `look` before any weight is loaded, so that
a refusal costs seconds; `begin` after it, so that a job that cannot load leaves nothing behind but what it found.  The
lock is held from the first to the job's end.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from bgmpi.errors import BgmpiError, UsageError
from bgmpi.io.attempts import Attempt, RowMap, alone, begin_attempt, next_number, read_attempts, row_maps
from bgmpi.io.collected import Collected, begun, collect
from bgmpi.io.kv_checkpoint import PATTERNS as KV_PATTERNS
from bgmpi.io.kv_checkpoint import attempt_of, read_index, read_rate
from bgmpi.io.publish import remove_parts
from bgmpi.io.results_file import open_results
from bgmpi.io.segments import parts_folder
from bgmpi.prepare import Job
from bgmpi.primitives import Ids
from bgmpi.recovery import Found, Left, Start, ended_sequences, how_to_start, nothing_left, restoring_pays
from bgmpi.report import Summary
from bgmpi.request import Begun, SavedKv

_LOG = logging.getLogger("bgmpi.resume")


@dataclass(slots=True)
class Resumption:
    """This attempt: its number, and how it begins.

    maps: how answers of every attempt, this one too, count; left: what earlier ones left; elapsed: seconds of the job
    that they took; summary: of the whole job, where nothing is left to do.
    """

    number: int
    start: Start
    left: Left
    maps: dict[int, RowMap]
    elapsed: float = 0.0
    summary: Summary | None = None


def look(job: Job, environ: Mapping[str, str], stack: ExitStack) -> Resumption:
    """Decide how this attempt begins, and read what it goes on with.  Rank 0.

    Raises UsageError where only the user can decide, or another job writes this output.
    """
    assert job.index is not None
    config, index = job.config, job.index
    folder = parts_folder(config.output_file)
    if folder.is_dir():
        _lock(folder, stack)
    attempts, damaged = read_attempts(folder)
    found = _found(job, attempts)
    requeued = environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")
    start = how_to_start(
        found, job.settings(), resume=config.resume, overwrite=config.overwrite, requeued=requeued
    )
    first = index.first_sequence()
    nothing = nothing_left(int(first[-1]))
    if start is Start.NOTHING and config.retry_failed:
        raise UsageError(
            f"--retry-failed: {config.output_file} is published, and error rows can only be tried again before; leave "
            "it out, or pass --overwrite to compute everything anew"
        )
    if start is Start.NOTHING:
        _LOG.info("%s holds the whole answer to this job: nothing is left to do", config.output_file)
        remove_parts(folder)  # a kill may have come while they were removed
        return Resumption(0, start, nothing, {}, summary=_summary(Path(config.output_file)))
    if start is Start.FRESH:
        return Resumption(1, start, nothing, {})
    maps, lost = row_maps(folder, attempts, index.sha256, index.content)
    if config.retry_failed:
        maps = {number: RowMap(how.rows, errors=False) for number, how in maps.items()}
    collected = collect(folder, maps)
    for sentence in (*damaged, *lost, *collected.damaged, *collected.journal.torn):
        _LOG.warning("%s", sentence)
    left = _left(folder, maps, collected, first)
    _choose_kv(job, folder, maps, left, first)
    elapsed = max((one.seconds for one in (*collected.journal.entries, *collected.journal.progress)), default=0.0)
    number = next_number(folder)
    _LOG.info(
        "attempt %d goes on: of %d sequences %d are done, %d are errors, %d are begun with %d tokens", number,
        len(left.done), int(left.done.sum()), int(left.failed.sum()), len(left.begun),
        sum(len(one.tokens) for one in left.begun.values()),
    )
    return Resumption(number, start, left, maps, elapsed)


def begin(job: Job, found: Resumption, stack: ExitStack) -> None:
    """Write down this attempt, in an empty folder where it is a fresh one.  Rank 0.  Raises WriteError."""
    assert job.index is not None
    folder = parts_folder(job.config.output_file)
    if found.start is Start.FRESH:
        remove_parts(folder)
        _lock(folder, stack)
    begin_attempt(
        folder, found.number, job.settings(), job.index.sha256, job.index.content,
        retry_failed=job.config.retry_failed,
    )
    found.maps[found.number] = RowMap()


# --- inside ---------------------------------------------------------------------------------------------------------


def _lock(folder: Path, stack: ExitStack) -> None:
    warnings: list[str] = []
    stack.enter_context(alone(folder, warnings))
    for sentence in warnings:
        _LOG.warning("%s", sentence)


def _found(job: Job, attempts: tuple[Attempt, ...]) -> Found:
    assert job.index is not None
    path = Path(job.config.output_file)
    parts = attempts[-1].settings if attempts else None
    if not path.exists():
        return Found(str(path), parts=parts)
    try:
        with open_results(path) as results:
            whole = results.attributes.get("input_sha256") == job.index.sha256
            settings = msgspec.json.decode(results.document("settings"), type=dict[str, str])
    except (BgmpiError, msgspec.MsgspecError):
        return Found(str(path), exists=True, parts=parts)
    return Found(str(path), exists=True, whole=whole, settings=settings, parts=parts)


def _left(folder: Path, maps: Mapping[int, RowMap], collected: Collected, first: Ids) -> Left:
    done, failed = ended_sequences(first, collected.row, collected.sample, collected.is_error)
    unfinished: dict[int, Begun] = {}
    samples = np.diff(first)
    for (row, sample), answer in begun(folder, maps, collected).items():
        sequence = int(first[row]) + sample
        if 0 <= sample < samples[row] and not (done[sequence] or failed[sequence]):
            unfinished[sequence] = Begun(answer.tokens, answer.logprobs, answer.first_token_s)
    return Left(done, failed, unfinished)


def _choose_kv(job: Job, folder: Path, maps: Mapping[int, RowMap], left: Left, first: Ids) -> None:
    """Give what is begun the KV that earlier attempts saved of it, where reading it is cheaper than computing it."""
    best: dict[int, tuple[SavedKv, int]] = {}
    rate = float("nan")
    for path in sorted(folder.glob(KV_PATTERNS[0])):
        number = attempt_of(path)
        index = read_index(path, job.kv_facts()) if number in maps else f"{path.name}: its attempt is not known"
        if isinstance(index, str):
            _LOG.warning("%s", index)
            continue
        rate = rate if np.isnan(index.prefill_rate) else index.prefill_rate
        row = maps[number].now(index.row)
        for sequence, saved in zip((first[row] + index.sample).tolist(), index.saved, strict=True):
            # Behind the last sequence where the row is gone: nobody there has begun.
            if sequence in left.begun and (sequence not in best or best[sequence][0].with_kv < saved.with_kv):
                best[sequence] = saved, saved.pages * index.page_bytes
    if not best:
        return
    size = np.array([size for _, size in best.values()], np.int64)
    tokens = np.array([saved.with_kv for saved, _ in best.values()], np.int64)
    speed = read_rate(Path(next(iter(best.values()))[0].path))
    pays = restoring_pays(size, tokens, speed, rate)
    for (sequence, (saved, _)), restored in zip(best.items(), pays.tolist(), strict=True):
        if restored:
            left.begun[sequence].kv = saved
    _LOG.info(
        "KV of %d begun sequences is read (%.1f MB at %.0f MB/s: about %.2f s), of %d more it was saved and is "
        "computed again (%d tokens at %.0f tok/s: about %.2f s), of %d it was not saved",
        pays.sum(), size[pays].sum() / 1e6, speed / 1e6, size[pays].sum() / speed, (~pays).sum(), tokens[~pays].sum(),
        rate, tokens[~pays].sum() / rate if not pays.all() else 0.0, len(left.begun) - len(pays),
    )  # fmt: skip


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

