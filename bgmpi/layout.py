"""What a rank is made of: its device, its weights, its KV pools, and who keeps their books.

Opened in one order on all ranks, because memory and windows are collective: device, weights (all of them, or a ring
that reads them anew in every sweep), the node's store, the device pool, the disk tier.  Everything that must be closed
is put on the caller's stack.  It decides no size: `memory_plan` and `weight_plan` do.
"""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bgmpi.config import Config
from bgmpi.errors import UsageError, WriteError
from bgmpi.eviction import Hold
from bgmpi.executor import Executor, Shape
from bgmpi.io.host_store import HostStore
from bgmpi.io.kv_spill import KvSpill
from bgmpi.io.layer_files import LayerFiles
from bgmpi.io.spill_file import cell_bytes, free_bytes
from bgmpi.kernels import open_backend
from bgmpi.kernels.backend import Backend
from bgmpi.kv_places import KvPlaces
from bgmpi.kv_stream import KvStream
from bgmpi.launcher import threads_for
from bgmpi.memory_plan import Room, device_pages, host_pages, room_left
from bgmpi.model import Model
from bgmpi.prepare import Job, page_bytes, together
from bgmpi.pulse import Phase
from bgmpi.sampling import Sampler
from bgmpi.sequence_manager import SequenceManager
from bgmpi.weight_plan import WeightPlan, plan_weights, weight_bytes
from bgmpi.weight_ring import WeightRing
from bgmpi.world import World

DEFAULT_B_ATTN = 512
#: Slots that a rank has at least, so that moved sequences find some.
LEAST_SLOTS = 16
#: Share of the free memory that weights may fill before they pass through a ring unasked.
WEIGHTS_SHARE = 0.8
#: Buffers of one layer through which streamed KV passes: one computes, one comes; with a disk, one more comes.
DEVICE_BUFFERS, DISK_BUFFERS = 2, 3
#: Without a device the buffers of the disk tier take this part of the home's bytes, and at least so many pages.
BUFFERS_SHARE, MIN_BUFFER_PAGES = 16, 16
_LOG = logging.getLogger("bgmpi.layout")


@dataclass(frozen=True, slots=True)
class Parts:
    """What a rank is made of.  pool: tokens of the longest sequence that every rank can hold; shardable: whether a
    group of ranks can compute one sequence together."""

    manager: SequenceManager
    executor: Executor
    sampler: Sampler
    store: HostStore
    spill: KvSpill | None
    pool: int
    shardable: bool


def lay_out(job: Job, world: World, stack: ExitStack) -> Parts:
    """Collective over the world: load the weights, lay out memory."""
    config = job.config
    world.pulse.enter(Phase.LOADING)
    slots = slots_of(config, job.sequences)
    cores, allowed = len(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS")
    threads = threads_for(world.node_size, config.threads, cores, allowed)
    name = "cpu" if config.backend == "auto" else config.backend
    backend = open_backend(name, world if world.size > 1 else None, threads, config.deterministic)
    weights = together(world, lambda: _plan_weights(job, world))
    model = together(world, lambda: _model(job, world, backend, weights, stack))
    world.barrier()  # all weights are loaded, else one rank would take for free what another still needs
    world.pulse.enter(Phase.LAYING_OUT)
    plan = together(world, lambda: _plan_kv(job, world, model, weights.ring_bytes, slots))
    world.barrier()
    budget = max(config.max_num_batched_tokens, slots)
    store = stack.enter_context(
        HostStore(world, pages=plan.pages, layers=model.layers, page_shape=model.page_shape(config.page_tokens),
                  dtype=job.dtype, hidden_rows=budget, hidden=job.architecture.hidden)
    )
    spill = together(world, lambda: _open_spill(config, world, plan, store, stack))
    places = KvPlaces(
        slots=slots, page_tokens=config.page_tokens, pages=store.pages, first=store.first,
        device_pages=plan.device_pages, disk_pages=plan.disk_pages, streamed_most=plan.stream_pages,
        stream=config.stream_kv != "off",
    )
    least = world.all_gather_counts(np.array([places.longest(), not weights.streamed], np.int64)).min(axis=0)
    pool, shardable = int(least[0]) * config.page_tokens, bool(least[1])
    if pool < job.context:
        _LOG.warning("KV memory holds %d tokens of one sequence, less than the context of %d", pool, job.context)
    manager = SequenceManager(
        places, slots=slots, budget=budget, most_tokens=min(job.context, pool), hold=Hold(config.hold_policy)
    )
    kv = KvStream(
        backend, store.tensor, device_pages=plan.device_pages, buffer_pages=plan.stream_pages,
        buffers=plan.stream_buffers, spill=spill,
    )
    shape = Shape(config.b_attn or DEFAULT_B_ATTN, config.b_moe or 0, config.yield_points)
    executor = Executor(model, backend, kv, places, store.rows, shape=shape, slots=slots, beat=world.pulse.beat)
    sampler = Sampler(slots, job.architecture.vocab, job.tokenizer.size, job.tokenizer.eos_ids, backend.device)
    _tell(job, world, threads, store, plan)
    return Parts(manager, executor, sampler, store, spill, pool, shardable)


def _plan_weights(job: Job, world: World) -> WeightPlan:
    """Decide whether the weights stay; unasked they pass through a ring only when the memory cannot hold them."""
    config, arch, itemsize = job.config, job.architecture, job.dtype.itemsize
    budget = config.weight_memory
    share = int(room_left(read_text, os.environ, world.node_size, None).bytes * WEIGHTS_SHARE) // world.node_size
    whole = weight_bytes(arch, world.rank, world.size, itemsize)
    if budget is None and whole > share:
        budget = share // 2
        _LOG.info("%.2f GB of weights do not fit into the memory left: they pass through in every step", whole / 1e9)
    plan = plan_weights(arch, world.rank, world.size, itemsize, budget)
    if plan.streamed and (config.b_moe or not config.yield_points):
        word = f"--b-moe {config.b_moe}" if config.b_moe else "--yield-points off"
        raise UsageError(
            f"{word}: weights that do not fit are read once a step for all sequences; leave it out, or raise "
            "--weight-memory"
        )
    return plan


def _model(job: Job, world: World, backend: Backend, weights: WeightPlan, stack: ExitStack) -> Model:
    ring = None
    if weights.streamed:
        files = LayerFiles(job.files, job.dtype)
        ring = stack.enter_context(
            WeightRing(job.architecture, weights, files, allow_nonfinite=job.config.allow_nonfinite)
        )
    return Model(
        job.architecture, job.files, backend, job.dtype, world.rank, world.size, job.config.allow_nonfinite, ring,
        world.pulse.beat,
    )


@dataclass(frozen=True, slots=True)
class KvPlan:
    """Pages of a rank.  pages: at home; device_pages: in the device pool, None without one; stream_pages: of one layer,
    in each of `stream_buffers`, 0 when nothing is streamed; disk_pages: in the disk tier."""

    pages: int
    device_pages: int | None = None
    stream_pages: int = 0
    stream_buffers: int = 0
    disk_pages: int = 0


def slots_of(config: Config, sequences: int) -> int:
    """Return how many sequences of a job with so many may be active on a rank.

    Unless the user says so no count limits them, only KV memory and the tokens of a step, of which each takes one.
    """
    if config.max_num_seqs is not None:
        return config.max_num_seqs
    return min(config.max_num_batched_tokens, max(sequences, LEAST_SLOTS))


def _plan_kv(job: Job, world: World, model: Model, ring_bytes: int, slots: int) -> KvPlan:
    """Decide how many pages of KV this rank has in each tier."""
    config, layers = job.config, model.layers
    one_page = page_bytes(model.page_shape(config.page_tokens), layers, job.dtype)
    full = -(-job.context // config.page_tokens)
    required = full if config.max_model_len is not None else 1
    shared = free_bytes("/dev/shm") if world.node_size > 1 else None
    room = room_left(read_text, os.environ, world.node_size, shared)
    budget = max(config.max_num_batched_tokens, slots)
    pages = host_pages(
        Room(max(0, room.bytes - ring_bytes * world.node_size), room.limit), asked=config.host_kv_memory,
        share=config.gpu_memory_utilization, node_ranks=world.node_size, page_bytes=one_page,
        rows_bytes=0 if config.host_kv_memory else budget * job.architecture.hidden * job.dtype.itemsize,
        most=full * slots, required=required, shared=shared,
    )  # fmt: skip
    disk_pages = 0
    if config.kv_spill is not None:
        if config.stream_kv == "off":
            raise UsageError(
                "--stream-kv off: KV on a disk computes only as it passes through; leave --kv-spill out, or let KV "
                "stream"
            )
        disk_pages = min(_disk_pages(config, world, layers, one_page // layers), full * slots)
    elif config.kv_spill_bytes is not None:
        raise UsageError(f"--kv-spill-bytes {config.kv_spill_bytes:,}: --kv-spill DIR must name the folder")
    buffers = DISK_BUFFERS if disk_pages else DEVICE_BUFFERS
    if config.device_memory is not None:
        device = device_pages(
            config.device_memory, page_bytes=one_page, layers=layers, buffers=buffers, longest=full,
            useful=full * (config.b_attn or DEFAULT_B_ATTN), required=required, stream=config.stream_kv != "off",
        )  # fmt: skip
        plan = KvPlan(pages, device.pages, device.stream_pages, buffers, disk_pages)
    elif disk_pages:
        affordable = pages * one_page // BUFFERS_SHARE // (buffers * (one_page // layers))
        buffer_pages = max(MIN_BUFFER_PAGES, min(affordable, full * slots))
        plan = KvPlan(pages, None, buffer_pages, buffers, disk_pages)
    else:
        return KvPlan(pages)
    if not config.yield_points:
        word = "--device-memory" if config.device_memory is not None else "--kv-spill"
        raise UsageError(f"--yield-points off computes with KV in place; leave {word} out, or yield points on")
    return plan


def _disk_pages(config: Config, world: World, layers: int, layer_page: int) -> int:
    """Return how many pages the disk tier of this rank has; raises UsageError or WriteError where it has none."""
    free, one_page = free_bytes(config.kv_spill or ""), layers * cell_bytes(layer_page)
    if config.kv_spill_bytes is None:
        share = free // 2 // world.node_size
        if share < one_page:
            raise WriteError(
                f"--kv-spill {config.kv_spill}: {free:,} bytes are free there, half of them over {world.node_size} "
                f"ranks is {share:,}, and a page of KV needs {one_page:,}; free space, or name another folder"
            )
        return share // one_page
    if config.kv_spill_bytes < one_page:
        raise UsageError(
            f"--kv-spill-bytes {config.kv_spill_bytes:,}: a page of KV needs {one_page:,} bytes on disk; raise it, or "
            "lower --page-tokens"
        )
    if config.kv_spill_bytes * world.node_size > free:
        _LOG.warning("--kv-spill %s has %d bytes free: less than --kv-spill-bytes of %d ranks", config.kv_spill, free,
                     world.node_size)
    return config.kv_spill_bytes // one_page


def _open_spill(config: Config, world: World, plan: KvPlan, store: HostStore, stack: ExitStack) -> KvSpill | None:
    if not plan.disk_pages or config.kv_spill is None:
        return None
    layers = store.tensor.shape[1]
    spill = KvSpill(
        config.kv_spill, world.rank, pages=plan.disk_pages, layers=layers, page_bytes=store.page_bytes // layers
    )
    stack.callback(spill.close)
    return spill


def read_text(path: str) -> str | None:
    """Return the text of a small file, None where there is none that can be read."""
    try:
        return Path(path).read_text()
    except OSError:
        return None


def _tell(job: Job, world: World, threads: int, store: HostStore, plan: KvPlan) -> None:
    size = store.pages * store.page_bytes / 1e9
    tiers = [f"{store.pages} KV pages of {job.config.page_tokens} tokens a rank ({size:.2f} GB)"]
    if plan.device_pages is not None:
        tiers.append(f"{plan.device_pages} of them fit on the device")
    if plan.stream_buffers:
        tiers.append(f"{plan.stream_buffers} buffers of {plan.stream_pages} pages of one layer")
    if plan.disk_pages:
        tiers.append(f"{plan.disk_pages} pages on disk")
    dtype = str(job.dtype).removeprefix("torch.")
    _LOG.info(
        "%s in %s on %d ranks x %d threads; %s", job.architecture.family, dtype, world.size, threads, "; ".join(tiers)
    )
