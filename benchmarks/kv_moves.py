"""Answers: what does it cost to move KV between device and host (YIELD, COMBINE) and between ranks (MIGRATE).

Physics: nothing but bytes.  Between tiers the ceiling is the machine's plain copy of as many contiguous bytes on the
same threads, between ranks one plain MPI_Get of as many contiguous bytes out of a window of the same kind.  Pages lie
scattered, so what is lost is the cost of a piece.  Every measurement alternates with its ceiling, and the best of each
counts, because on a shared machine the middle one tells of the neighbours.

The KV is that of the paper's table (A9): 61 layers of latent pages, 64 x 576 bfloat16; COMBINE restores one layer of a
sequence of 10K tokens, MIGRATE takes 2K tokens, 144 MB.  The target of a MIGRATE sleeps outside of MPI meanwhile.

One rank (no launcher): device and host.  `mpiexec -n 2`, or srun over two nodes: MIGRATE, and a round of control.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from line import Limit, print_line

from bgmpi.io.host_store import HostStore
from bgmpi.kernels import open_backend
from bgmpi.primitives import Moved, Reported, Run
from bgmpi.world import World, decode, open_world

LAYERS, PAGE_TOKENS, LATENT = 61, 64, 576
PAGE_SHAPE, DTYPE = (PAGE_TOKENS, LATENT), torch.bfloat16
COMBINE_TOKENS, MOVED_TOKENS = 10_240, 2_048
COMBINE_PAGES, MOVED_PAGES = COMBINE_TOKENS // PAGE_TOKENS, MOVED_TOKENS // PAGE_TOKENS
SHARE_LIMIT = 0.5
ROUNDS = 200


def best(span: float, *deeds: Callable[[], object]) -> list[float]:
    """Return the least seconds of each deed; they take turns for `span` seconds, ten times each at least."""
    seconds: list[list[float]] = [[] for _ in deeds]
    for deed in deeds:
        deed()
    begun = time.perf_counter()
    while time.perf_counter() - begun < span or len(seconds[0]) < 10:
        for deed, each in zip(deeds, seconds, strict=True):
            begin = time.perf_counter()
            deed()
            each.append(time.perf_counter() - begin)
    return [min(each) for each in seconds]


def open_store(world: World, pages: int) -> HostStore:
    """Collective over the world: open a store whose memory is there, not only promised."""
    store = HostStore(world, pages=pages, layers=LAYERS, page_shape=PAGE_SHAPE, dtype=DTYPE)
    store.tensor[store.first : store.first + pages] = 1 + world.rank
    store.sync()
    world.barrier()
    return store


def tiers(world: World, threads: int, span: float) -> tuple[dict[str, float], list[Limit]]:
    """Time YIELD and COMBINE with KV between a device pool and the host store."""
    backend = open_backend("cpu", None, threads)
    begin = time.perf_counter()
    with open_store(world, COMBINE_PAGES) as store:
        opened = time.perf_counter() - begin
        store_bytes = store.tensor.nbytes
        random = np.random.default_rng(0)
        pages, places = random.permutation(COMBINE_PAGES), np.arange(COMBINE_PAGES)
        buffer = torch.zeros(COMBINE_PAGES, *PAGE_SHAPE, dtype=DTYPE)
        one_layer = buffer.nbytes
        flat = buffer.view(-1)
        pieces = store.tensor.view(-1)[: LAYERS * flat.numel()].view(LAYERS, -1)
        at = [0, 0, 0]

        def turn(which: int) -> int:
            at[which] = (at[which] + 7) % LAYERS  # never one that a cache still holds
            return at[which]

        def plain(which: int, copy: Callable[[torch.Tensor, torch.Tensor], object]) -> Callable[[], object]:
            return lambda: copy(flat, pieces[turn(which)])

        combine, one_thread, all_threads = best(
            span,
            lambda: backend.copy_pages(buffer, places, store.layer(turn(0)), pages).wait(),
            plain(1, lambda to, of: np.copyto(to.view(torch.int16).numpy(), of.view(torch.int16).numpy())),
            plain(2, lambda to, of: to.copy_(of)),
        )
        device = torch.zeros(MOVED_PAGES, LAYERS, *PAGE_SHAPE, dtype=DTYPE)
        places, home = np.arange(MOVED_PAGES), random.permutation(COMBINE_PAGES)[:MOVED_PAGES]
        halves = store.tensor.view(-1)[: device.numel()]
        left, back, moved_plain = best(
            span,
            lambda: backend.copy_pages(store.tensor, home, device, places).wait(),
            lambda: backend.copy_pages(device, places, store.tensor, home).wait(),
            lambda: device.view(-1).copy_(halves),
        )
    plainly = min(one_thread, all_threads)
    figures = {
        "threads": float(threads),
        "combine_layer_us": 1e6 * combine,
        "combine_layer_gb_s": one_layer / combine / 1e9,
        "memcpy_gb_s": one_layer / plainly / 1e9,
        "yield_kv_2k_ms": 1e3 * left,
        "yield_kv_2k_share_of_memcpy": moved_plain / left,
        "combine_kv_2k_ms": 1e3 * back,
        "combine_kv_2k_share_of_memcpy": moved_plain / back,
        "host_store_s_a_gb": opened / store_bytes * 1e9,
    }
    return figures, [Limit("combine_with_kv_share_of_memcpy", plainly / combine, SHARE_LIMIT, ">=")]


def between(world: World, span: float) -> tuple[dict[str, float], list[Limit]]:
    """Collective over two ranks: time MIGRATE's bytes from rank 1 to rank 0, and a round's gather and scatter."""
    nodes = len(set(world.node_of.tolist()))
    where = "between_nodes" if nodes > 1 else "within_a_node"
    figures: dict[str, float] = {}
    with open_store(world, 2 * MOVED_PAGES) as store:
        size = MOVED_PAGES * store.page_bytes
        plain = world.allocate(size)
        np.frombuffer(plain.tomemory(), np.uint8)[:] = 9
        plain.Sync()
        firsts = world.all_gather_counts(np.array([store.first], np.int64))[:, 0]
        if world.rank == 0:
            random = np.random.default_rng(0)
            theirs, mine = (random.permutation(2 * MOVED_PAGES)[:MOVED_PAGES] for _ in range(2))
            # Into memory of the same kind: what a window has is not always what a fresh array has.
            target = store.tensor[:MOVED_PAGES].view(torch.uint8).view(-1).numpy()

            def get() -> None:
                plain.Get(target, 1, 0)
                plain.Flush(1)

            moved, got = best(span, lambda: store.fetch(1, theirs + firsts[1], mine).wait(), get)
            store.fetch(1, theirs + firsts[1], mine).wait()
            assert bool((store.tensor[torch.from_numpy(mine)] == 2).all()), "fetched pages are those of the other rank"
            figures[f"migrate_2k_ms_{where}"] = 1e3 * moved
            figures[f"migrate_gb_s_{where}"] = size / moved / 1e9
            figures[f"mpi_get_gb_s_{where}"] = size / got / 1e9
            share = got / moved
        else:
            time.sleep(span)
        world.barrier()
        plain.Unlock_all()
        plain.Free()
    figures[f"round_of_control_us_{where}"] = 1e6 * round_of_control(world)
    if world.rank:
        return {}, []
    return figures, [Limit(f"migrate_share_of_mpi_get_{where}", share, SHARE_LIMIT, ">=")]


def round_of_control(world: World) -> float:
    """Collective over the world: return the median seconds of one round's gather and scatter, decisions left out."""
    report = Reported(world.rank, (Moved(5, np.arange(64)),), 9, 9, 9, 9)
    seconds = []
    for _ in range(ROUNDS):
        world.barrier()
        begin = time.perf_counter()
        reports = world.gather(report)
        if reports is not None:
            for one in reports:
                decode(one, Reported)
        world.scatter([Run(64)] * world.size if world.rank == 0 else None, Run)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def main() -> None:
    """Print the figures, and on rank 0 the JSON line."""
    parser = argparse.ArgumentParser(description="What does it cost to move KV?")
    parser.add_argument("--quick", action="store_true", help="a tenth of the time")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads of the one rank")
    asked = parser.parse_args()
    span = 1.0 if asked.quick else 10.0
    with open_world() as world:
        if world.size not in (1, 2):
            parser.error(f"start it on one rank, or on two; got {world.size}")
        figures, limits = tiers(world, asked.threads, span) if world.size == 1 else between(world, span)
        if world.rank == 0:
            for name, value in figures.items():
                print(f"{name:>40}  {value:.4g}")
            print_line("kv_moves", figures, limits, quick=asked.quick)


if __name__ == "__main__":
    main()
