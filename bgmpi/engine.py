"""The SPMD round: one gather, one decision on rank 0, one scatter, then up to a page of steps (design laws 1 and 2).

`run` opens world, files, weights and writers in order and closes them in reverse.  All decisions are the scheduler's
and the sequence managers', all tensors the executor's; what is left here is order.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch

from bgmpi import log
from bgmpi.config import Config
from bgmpi.errors import InternalError, UsageError
from bgmpi.executor import Executor, Shape
from bgmpi.head import Head, Orders
from bgmpi.io.publish import remove_parts
from bgmpi.io.segments import SegmentWriter, parts_folder
from bgmpi.kernels import open_backend
from bgmpi.launcher import threads_for
from bgmpi.model import Model
from bgmpi.prepare import Job, available_memory, page_bytes, pages_that_fit, prepare, together
from bgmpi.primitives import Admit, Reported, Run, Stop
from bgmpi.rank import Rank
from bgmpi.report import Summary
from bgmpi.sampling import Sampler
from bgmpi.sequence_manager import SequenceManager
from bgmpi.tally import Counts, Tally, total
from bgmpi.world import World, decode, open_world

DEFAULT_B_ATTN = 512
_LOG = logging.getLogger("bgmpi.engine")


def run(config: Config) -> Summary:
    """Collective over the world: run the job that `config` describes; -> its summary on every rank.

    Raises the same BgmpiError on every rank when the job cannot be run; a rank that fails alone ends all of them.
    Source: design sections 3 and 7.
    """
    begun = time.perf_counter()
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        world = stack.enter_context(open_world(allow_mismatch=config.allow_rank_mismatch))
        log.configure(world.rank, world.host, config.log_level)
        together(world, lambda: _check_ranks(config, world))
        _name_processes(world)
        job = prepare(config, world)
        clock = _common_clock(world, begun)
        parts = _load(job, world)
        # Only now: a job whose weights cannot be loaded leaves no folder that its second try would stumble over.
        writer = stack.enter_context(_open_writer(job, world, clock))
        tally = Tally(writer)
        rank = Rank(
            world, parts.manager, parts.executor, parts.sampler, job.tokenizer, clock, tally.take, config.check
        )
        world.barrier()
        loaded = clock()
        head = None
        if world.rank == 0:
            head = Head(job, world.size, pool=parts.pool, clock=clock, refuse=tally.take, stack=stack)
        _rounds(world, head, rank, writer)
        together(world, writer.close)
        return _finish(world, head, tally.counts(rank.executor.model.routed.numpy(force=True)), loaded)


def _rounds(world: World, head: Head | None, rank: Rank, writer: SegmentWriter) -> None:
    """Collective over the world: rounds until every sequence has ended."""
    while True:
        reports = world.gather(rank.report())
        orders = None
        if head is not None and reports is not None:
            orders = head.decide([decode(report, Reported) for report in reports])
        mine = world.scatter(orders, Orders)
        for instruction in mine.instructions:
            match instruction:
                case Admit():
                    rank.admit(mine.work)
                case Run():
                    rank.run(instruction)
                case Stop():
                    return
                case _:
                    raise InternalError(f"rank {world.rank} cannot carry out {type(instruction).__name__}")
        writer.flush_if_due()


def _finish(world: World, head: Head | None, counts: Counts, loaded: float) -> Summary:
    """Collective over the world: publish on rank 0, tell everybody the summary."""
    everyone = world.gather(counts)

    def publish() -> Summary | None:
        if head is None or everyone is None:
            return None
        return head.summarise(total(decode(one, Counts) for one in everyone), head.publish(), loaded)

    return world.broadcast(together(world, publish), Summary)


def _check_ranks(config: Config, world: World) -> None:
    if config.ranks is not None and config.ranks != world.size:
        raise UsageError(f"--ranks {config.ranks}, but the launcher started {world.size}; leave --ranks out")


def _name_processes(world: World) -> None:
    """Collective over the world: log every rank's PID, all that launcher and kernel tell of a killed one."""
    everyone = world.gather((world.host, os.getpid()))
    if world.size == 1 or everyone is None:
        return
    named: dict[str, list[str]] = {}
    for rank, one in enumerate(everyone):
        host, pid = decode(one, tuple[str, int])
        named.setdefault(host, []).append(f"{rank} is PID {pid}")
    for host, ranks in named.items():
        _LOG.info("on %s rank %s", host, ", ".join(ranks))


def _common_clock(world: World, begun: float) -> Callable[[], float]:
    """Collective over the world: return seconds since rank 0 began, set together at a barrier."""
    world.barrier()
    here = time.perf_counter()
    elapsed = world.broadcast(here - begun, float)
    return lambda: time.perf_counter() - here + elapsed


def _open_writer(job: Job, world: World, clock: Callable[[], float]) -> SegmentWriter:
    """Collective over the world: clear what an earlier run left (--overwrite allowed it), open this rank's writer."""
    folder = parts_folder(job.config.output_file)
    together(world, lambda: remove_parts(folder) if world.rank == 0 else None)
    return together(
        world,
        lambda: SegmentWriter(
            folder,
            world.rank,
            segment_bytes=job.config.segment_bytes,
            segment_seconds=job.config.segment_seconds,
            clock=clock,
        ),
    )


@dataclass(frozen=True, slots=True)
class Parts:
    """What a rank is made of.  pool: tokens of KV of the smallest rank."""

    manager: SequenceManager
    executor: Executor
    sampler: Sampler
    pool: int


def _load(job: Job, world: World) -> Parts:
    """Collective over the world: load the weights, lay out memory."""
    config, vocab = job.config, job.architecture.vocab
    slots = config.max_num_seqs
    cores, allowed = len(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS")
    threads = threads_for(world.node_size, config.threads, cores, allowed)
    name = "cpu" if config.backend == "auto" else config.backend
    backend = open_backend(name, world if world.size > 1 else None, threads)
    model = together(
        world,
        lambda: Model(
            job.architecture, job.files, backend, job.dtype, world.rank, world.size, config.allow_nonfinite
        ),
    )
    one_page = page_bytes(model.page_shape(config.page_tokens), model.layers, job.dtype)
    pages = together(
        world, lambda: pages_that_fit(config, one_page, job.context, world.node_size, available_memory(os.environ))
    )
    pool = int(world.all_gather_counts(np.array([pages], np.int64)).min()) * config.page_tokens
    if pool < job.context:
        _LOG.warning("KV memory holds %d tokens of one sequence, less than the context of %d", pool, job.context)
    budget = max(config.max_num_batched_tokens, slots)
    manager = SequenceManager(
        slots=slots,
        pages=pages,
        page_tokens=config.page_tokens,
        budget=budget,
        most_tokens=min(job.context, pool),
    )
    shape = Shape(config.b_attn or DEFAULT_B_ATTN, config.b_moe or 0, config.yield_points)
    executor = Executor(
        model, backend, job.dtype, shape=shape, pages=pages, page_tokens=config.page_tokens, budget=budget, slots=slots
    )
    sampler = Sampler(slots, vocab, job.tokenizer.size, job.tokenizer.eos_ids, backend.device)
    _LOG.info(
        "%s in %s on %d ranks x %d threads; %d KV pages of %d tokens a rank (%.2f GB)",
        job.architecture.family,
        str(job.dtype).removeprefix("torch."),
        world.size,
        threads,
        pages,
        config.page_tokens,
        pages * one_page / 1e9,
    )
    return Parts(manager, executor, sampler, pool)
