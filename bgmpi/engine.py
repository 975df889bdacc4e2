"""The SPMD round: one gather, one decision on rank 0, one scatter, then up to a page of steps (design laws 1 and 2).

`run` opens world, files, weights and writers in order and closes them in reverse.  All decisions are the scheduler's
and the sequence managers', all tensors the executor's; what is left here is order.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch

from bgmpi import log
from bgmpi.balance import Evening
from bgmpi.config import Config
from bgmpi.errors import BgmpiError, ExitCode, OutOfMemory, UsageError
from bgmpi.group import Group
from bgmpi.head import Head, Orders
from bgmpi.io.segments import SegmentWriter, parts_folder
from bgmpi.lateness import Limits
from bgmpi.layout import Parts, lay_out
from bgmpi.long_tail import TailRules
from bgmpi.prepare import Job, prepare, together
from bgmpi.primitives import Admit, Combine, Migrate, Partition, Reported, Run, Stop, Yield
from bgmpi.pulse import Phase
from bgmpi.rank import Rank
from bgmpi.rehearsal import rehearse
from bgmpi.report import Summary
from bgmpi.resume import Resumption, begin, look
from bgmpi.saved_kv import KvCheckpoint
from bgmpi.scheduler import Rules
from bgmpi.stop_request import StopRequest
from bgmpi.stop_rules import StopRules
from bgmpi.tally import Counts, Tally, total
from bgmpi.tokenising import read_prompts
from bgmpi.watch import watched
from bgmpi.weight_plan import everywhere_bytes
from bgmpi.world import World, decode, open_world

#: What a switch to groups takes beside making the shards: a round or two, and copying KV.
_SWITCH_SECONDS = 0.02
#: Gathers of a layer, at least, and bytes a second that the slowest memory of a rank delivers.
_GATHERS, _SLOW_MEMORY = 3, 10e9
_LOG = logging.getLogger("bgmpi.engine")


def run(config: Config, stop: StopRequest) -> Summary:
    """Collective over the world: run the job that `config` describes; -> its summary on every rank.

    Raises the same BgmpiError on every rank when the job cannot be run, or is stopped (by `stop` of any rank, by the
    wall time, by too many errors) with its state saved; a rank that fails alone ends all of them.
    Source: design sections 3 and 7.
    """
    begun = time.perf_counter()
    with ExitStack() as stack, _out_of_memory_is_told(config):
        stack.enter_context(torch.inference_mode())
        world = stack.enter_context(open_world(allow_mismatch=config.allow_rank_mismatch))
        world.stop = stop
        with stop.loading():
            opened = _open(config, world, begun, stack)
            together(world, lambda: None)  # who was asked to stop between two stages says so now
        if isinstance(opened, Summary):
            return opened
        last = _rounds(world, opened.head, opened.rank, opened.checkpoint)
        if last.reason:
            _stop_early(world, opened, last)
        world.pulse.enter(Phase.WRITING)
        together(world, opened.checkpoint.writer.close)
        return _finish(world, opened)


@dataclass(frozen=True, slots=True)
class _Opened:
    """A job that is ready for its first round.  head: on rank 0; loaded: seconds until then; spilled: tells bytes that
    went to the disk tier."""

    head: Head | None
    rank: Rank
    checkpoint: _Checkpoint
    loaded: float
    spilled: Callable[[], int]


def _open(config: Config, world: World, begun: float, stack: ExitStack) -> _Opened | Summary:
    """Collective over the world: check, load and lay out everything; -> the summary where nothing is left to do."""
    log.configure(world.rank, world.host, config.log_level)
    together(world, lambda: _check_ranks(config, world))
    _name_processes(world)
    stack.enter_context(watched(world, Limits(config.heartbeat, config.startup_timeout)))
    world.pulse.enter(Phase.READING)
    job = prepare(config, world)
    world.pulse.enter(Phase.RESUMING)
    attempt = together(world, lambda: look(job, os.environ, stack) if world.rank == 0 else None)
    whole = world.broadcast([attempt.summary] if attempt is not None and attempt.summary else [], list[Summary])
    if whole:
        return whole[0]
    clock = _common_clock(world, begun, attempt)
    parts = lay_out(job, world, stack)
    groups = world.groups()
    # Only now: a job whose weights cannot be loaded leaves no folder that its second try would stumble over.
    writer = stack.enter_context(_open_writer(job, world, clock, attempt, stack))
    world.pulse.enter(Phase.TOKENISING)
    prompts = read_prompts(job, world, attempt.left.ended if attempt is not None else None, writer.folder, stack)
    tally = Tally(writer)
    rank = Rank(
        world, groups, parts.store, parts.manager, parts.executor, parts.sampler, job.tokenizer, clock, tally.take,
        config.check, notes=config.trace is not None,
    )  # fmt: skip
    tail = _tail_rules(job, world, groups, parts)
    loaded = clock()
    head = None
    if world.rank == 0:
        assert attempt is not None
        head = Head(
            job, world.size, _rules(job, world, parts, tail), attempt=attempt, pool=parts.pool, clock=clock,
            refuse=tally.take, stop_rules=_stop_rules(config, os.environ), stack=stack, prompts=prompts,
        )  # fmt: skip
    kv = KvCheckpoint(config.checkpoint_kv, writer.folder, writer.attempt, job.kv_facts())
    checkpoint = _Checkpoint(writer, rank, clock, config.checkpoint_interval, kv)
    spill = parts.spill
    return _Opened(
        head, rank, checkpoint, loaded, lambda: spill.writes.bytes if spill is not None else 0
    )  # fmt: skip


@dataclass(slots=True)
class _Checkpoint:
    """Saves this rank's answers when a segment is due, and every `interval` seconds also how far the others are."""

    writer: SegmentWriter
    rank: Rank
    clock: Callable[[], float]
    interval: float
    kv: KvCheckpoint
    saved: float = 0.0

    def save_if_due(self) -> None:
        """Local.  Raises WriteError."""
        if self.clock() - self.saved >= self.interval:
            self.save(last=False)
        else:
            self.writer.flush_if_due()

    def save(self, *, last: bool) -> None:
        """Local.  Raises WriteError.  last: the job stops here."""
        self.writer.flush()
        self.writer.save_progress(self.rank.unfinished())
        self.kv.save(self.rank, last=last)
        self.saved = self.clock()


def _rounds(world: World, head: Head | None, rank: Rank, checkpoint: _Checkpoint) -> Stop:
    """Collective over the world: rounds until every sequence has ended, or the job must stop before -> the last."""
    while True:
        world.pulse.enter(Phase.DECIDING if head is not None else Phase.ORDERS)
        reports = world.gather(rank.report())
        orders = None
        if head is not None and reports is not None:
            orders = head.decide([decode(report, Reported) for report in reports])
        mine = world.scatter(orders, Orders)
        world.pulse.enter(Phase.MOVING)
        moves = [one for one in mine.instructions if isinstance(one, Migrate)]
        groups = [one for one in mine.instructions if isinstance(one, Partition)]
        for instruction in mine.instructions:
            match instruction:
                case Yield(sequences=names):
                    rank.suspend(names)
                case Combine(sequences=names):
                    rank.resume(names)
                case Migrate():
                    if instruction is moves[0]:
                        rank.migrate(moves)
                case Partition():
                    if instruction is groups[0]:
                        rank.partition(groups)
                case Admit():
                    rank.admit(mine.work)
                case Run():
                    rank.close(mine.closed)
                    rank.run(instruction)
                case Stop():
                    return instruction
        world.pulse.enter(Phase.WRITING)
        checkpoint.save_if_due()


def _stop_early(world: World, opened: _Opened, last: Stop) -> NoReturn:
    """Collective over the world: save all that ranks have, raise on each why the job stops."""
    world.pulse.enter(Phase.WRITING)
    together(world, lambda: opened.checkpoint.save(last=True))
    together(world, opened.checkpoint.writer.close)
    where = f"all that was computed is saved in {opened.checkpoint.writer.folder}"
    error = BgmpiError(f"{last.reason}; {where}" + ("; run again to go on" if last.code == ExitCode.STOPPED else ""))
    if opened.head is not None:
        opened.head.stop(str(error))
    error.exit_code = ExitCode(last.code)
    error.agreed = True
    raise error


def _finish(world: World, opened: _Opened) -> Summary:
    """Collective over the world: publish on rank 0, tell everybody the summary."""
    world.pulse.enter(Phase.PUBLISHING)
    head, rank = opened.head, opened.rank
    rank.moves.spilled_bytes = opened.spilled()
    everyone = world.gather(Counts(rank.executor.model.routed.numpy(force=True), rank.moves))

    def publish() -> Summary | None:
        if head is None or everyone is None:
            return None
        published = head.publish(world.pulse.beat)
        return head.summarise(total(decode(one, Counts) for one in everyone), published, opened.loaded)

    summary = world.broadcast(together(world, publish), Summary)
    world.pulse.enter(Phase.ENDING)
    return summary


@contextmanager
def _out_of_memory_is_told(config: Config) -> Iterator[None]:
    """Raise OutOfMemory for whatever libraries say when there is no more: torch's is a RuntimeError like any other."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        raise OutOfMemory(
            f"out of memory ({str(error).splitlines()[0] if str(error) else 'no detail'}); finished rows are safe in "
            f"{parts_folder(config.output_file)}; lower --host-kv-memory, --weight-memory or --max-num-batched-tokens, "
            "or start fewer ranks a node"
        ) from error


def _check_ranks(config: Config, world: World) -> None:
    if config.ranks is not None and config.ranks != world.size:
        raise UsageError(f"--ranks {config.ranks}, but the launcher started {world.size}; leave --ranks out")
    if config.on_rank_death != "restart":
        raise UsageError(
            f"--on-rank-death {config.on_rank_death}: not built, and docs/reliability.md says why; leave it out: "
            "the job ends when a rank dies, and goes on where it was when it is started again"
        )


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


def _common_clock(world: World, begun: float, attempt: Resumption | None) -> Callable[[], float]:
    """Collective over the world: return seconds of the job, set together at a barrier: since rank 0 began, and those of
    earlier attempts."""
    world.barrier()
    here = time.perf_counter()
    elapsed = world.broadcast(here - begun + (attempt.elapsed if attempt is not None else 0.0), float)
    return lambda: time.perf_counter() - here + elapsed


def _open_writer(
    job: Job, world: World, clock: Callable[[], float], attempt: Resumption | None, stack: ExitStack
) -> SegmentWriter:
    """Collective over the world: write down this attempt, open this rank's writer."""
    folder = parts_folder(job.config.output_file)
    together(world, lambda: begin(job, attempt, stack) if attempt is not None else None)
    number = world.broadcast(attempt.number if attempt is not None else None, int)
    return together(
        world,
        lambda: SegmentWriter(
            folder,
            world.rank,
            attempt=number,
            segment_bytes=job.config.segment_bytes,
            segment_seconds=job.config.checkpoint_interval,
            clock=clock,
        ),
    )


def _rules(job: Job, world: World, parts: Parts, tail: TailRules) -> Rules:
    """Return the scheduler's constants for this job and machine."""
    config, several = job.config, world.size > 1
    return Rules(
        round_steps=config.page_tokens,
        page_tokens=config.page_tokens,
        migrate=config.migrate and several,
        partition=config.partition and several,
        shardable=parts.shardable,
        evening=Evening(page_bytes=parts.store.page_bytes, nodes=tuple(world.node_of.tolist())),
        tail=tail,
    )


def _stop_rules(config: Config, environ: Mapping[str, str]) -> StopRules:
    """Return when this job stops by itself."""
    end = environ.get("SLURM_JOB_END_TIME", "")
    return StopRules(float(end) if end.isdigit() else None, config.stop_before_walltime, config.max_errors)


def _may_pay(job: Job, world: World, group: Group) -> bool:
    """Collective over the world: say whether computing a sequence together could be faster anywhere, before it is
    rehearsed: not with fewer cores than ranks, nor where gathers alone take longer than reading what a group splits."""
    arch, itemsize = job.architecture, job.dtype.itemsize
    read = everywhere_bytes(arch, itemsize)
    waited = []
    for _ in range(8):
        world.barrier()
        begun = time.perf_counter()
        group.all_gather_counts(np.zeros(1, np.int64))
        waited.append(time.perf_counter() - begun)
    alone = world.node_size <= len(os.sched_getaffinity(0))
    pays = alone and read / _SLOW_MEMORY > min(waited) * (_GATHERS * arch.layers + 1)
    return bool(world.all_gather_counts(np.array([pays], np.int64)).all())


def _tail_rules(job: Job, world: World, groups: dict[tuple[int, int], Group], parts: Parts) -> TailRules:
    """Collective over the world: return the constants of the tail, rehearsed where a group may be formed."""
    config = job.config
    lockstep = parts.executor.lockstep
    if world.size == 1 or not config.partition or not parts.shardable:
        return TailRules(lockstep=lockstep)
    world.pulse.enter(Phase.REHEARSING)
    if not _may_pay(job, world, groups[0, world.size]):
        _LOG.info("no groups of ranks: one sequence alone is faster than any group could be here")
        return TailRules(lockstep=lockstep)
    tried = rehearse(world, groups, parts.executor.model, config.page_tokens)
    for size, share in tried.shares.items():
        _LOG.info("one sequence over %d ranks: a step should take %.2f of a lone one", size, share)
    return TailRules(shares=tried.shares, switch_seconds=tried.shard_seconds + _SWITCH_SECONDS, lockstep=lockstep)
