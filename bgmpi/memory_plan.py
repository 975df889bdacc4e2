"""How many pages of KV a rank has, at home and on its device: numbers in, numbers out (paper A2, A7).

Home is the node's host memory.  What of it may still be taken is the least of four limits, each of which has ended jobs
that looked at another one only: free memory, the memory cgroup and every one above it, the job's limit in Slurm, and
the file system behind shared memory, where a page too many is no error but a signal.  Page cache counts as free.

A device's budget is split between the pool of resident sequences and the stream buffers of one layer each through which
all others pass; the buffers come first, because without them nothing is ever computed.

Reads no file itself and takes no memory: `read` answers with the text of a file, so every machine is a dictionary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from bgmpi.errors import UsageError

#: Answers with the text of a file, None where there is none.
Read = Callable[[str], str | None]

#: The part of the device for stream buffers, where that is more than the longest sequence needs: small buffers mean
#: many small micro-batches (a quarter is a tenth slower than half, in benchmarks/host_memory.py).
_STREAM_SHARE = 2
_V1 = ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
_V2 = ("/sys/fs/cgroup", "memory.max", "memory.current", "")


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that the ranks of a node may still take together, and which limit says so."""

    bytes: int
    limit: str


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """What a rank's device holds.  pages: of all layers, for resident sequences; stream_pages: of one layer, in each
    stream buffer, and so the longest sequence that can be streamed."""

    pages: int
    stream_pages: int


def room_left(read: Read, environ: Mapping[str, str], node_ranks: int, shared: int | None) -> Room:
    """Return what this node's ranks may still take.  shared: free bytes of the file system behind shared memory, None
    where the window does not lie there (a rank alone on its node)."""
    rooms = [Room(_line_bytes(read("/proc/meminfo"), "MemAvailable:"), "the node's free memory")]
    rooms += [Room(left, f"memory cgroup {path}") for path, left in _cgroups(read)]
    job = _slurm_bytes(environ)
    if job is not None:
        status = read("/proc/self/status")
        used = _line_bytes(status, "RssAnon:") + _line_bytes(status, "RssShmem:")
        rooms.append(Room(job - used * node_ranks, "the job's memory in Slurm"))
    if shared is not None:
        rooms.append(Room(shared, "the file system for shared memory"))
    least = min(rooms, key=lambda room: room.bytes)
    return Room(max(least.bytes, 0), least.limit)


def host_pages(
    room: Room, *, asked: int | None, share: float, node_ranks: int, page_bytes: int, rows_bytes: int = 0,
    most: int, required: int = 1, shared: int | None = None,
) -> int:  # fmt: skip
    """Return the pages of each rank of a node.

    asked: --host-kv-memory, bytes of the node, else `share` of the room; page_bytes: one page of all layers;
    rows_bytes: what else a rank's segment holds; most: pages that all its sequences can ever fill; required: pages of
    the longest sequence that must fit; shared: as in `room_left`.  Raises UsageError where they do not fit.
    """
    if asked is not None and shared is not None and asked > shared:
        raise UsageError(
            f"--host-kv-memory {asked:,}: the file system for shared memory has {shared:,} bytes left on this node; "
            f"lower it, start one rank a node, or let the administrator enlarge /dev/shm"
        )
    whole = asked if asked is not None else int(room.bytes * share)
    source = "--host-kv-memory" if asked is not None else f"{room.limit} ({room.bytes:,} bytes left)"
    budget = whole // node_ranks
    pages = min((budget - rows_bytes) // page_bytes, most)
    if pages < max(required, 1):
        raise UsageError(
            f"{budget:,} bytes for the KV of a rank, from {source} over {node_ranks} ranks, hold {max(pages, 0)} pages "
            f"of {page_bytes:,} bytes, and a sequence needs {max(required, 1)}; raise --host-kv-memory, start fewer "
            f"ranks a node, or lower --max-model-len"
        )
    return pages


def device_pages(
    device_memory: int, *, page_bytes: int, layers: int, buffers: int, longest: int, useful: int, required: int = 1,
    stream: bool,
) -> DevicePlan:  # fmt: skip
    """Split a rank's --device-memory (bytes).

    page_bytes: one page of all layers; buffers: how many stream buffers there are; longest: pages of the longest
    sequence that may come; useful: pages that a micro-batch can fill; required: pages of the longest sequence that must
    fit; stream: whether sequences that are not resident decode too.  If not, a buffer holds one sequence in prefill and
    no more, and decoding needs the pool.  Longer sequences than `stream_pages` (or, without stream, `pages`) are
    refused at admission; raises UsageError where even `required` pages are too many.
    """
    layer_page = page_bytes // layers
    affordable = device_memory // (buffers * layer_page)
    if stream:
        stream_pages = min(max(longest, min(affordable // _STREAM_SHARE, useful)), affordable)
        least = required * buffers * layer_page
    else:
        # A sequence of n pages needs n in the pool and n in each buffer.
        stream_pages = min(longest, device_memory // (page_bytes + buffers * layer_page))
        least = required * (page_bytes + buffers * layer_page)
    if stream_pages < max(required, 1):
        raise UsageError(
            f"--device-memory {device_memory:,}: the longest sequence has {required} pages and needs {least:,} bytes "
            f"({buffers} buffers of one layer{'' if stream else ', and all its KV while it decodes'}); raise it, or "
            f"lower --max-model-len"
        )
    return DevicePlan((device_memory - buffers * stream_pages * layer_page) // page_bytes, stream_pages)


# --- what a machine says --------------------------------------------------------------------------------------------


def _line_bytes(text: str | None, name: str) -> int:
    """Return the kB of the line that begins with `name` as bytes, 0 where there is none."""
    for line in (text or "").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) << 10
    return 0


def _cgroups(read: Read) -> Iterator[tuple[str, int]]:
    """Yield each memory cgroup above this process that has a limit, and what is left there."""
    for line in (read("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, limit_name, usage_name, total = _V1 if controllers else _V2
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts), -1, -1):
            folder = "/".join([root, *parts[:depth]])
            limit, usage = (read(f"{folder}/{name}") for name in (limit_name, usage_name))
            if limit is None or usage is None or not limit.strip().isdigit():
                continue
            cache = sum(
                int(amount)
                for name, amount in (entry.split() for entry in (read(f"{folder}/memory.stat") or "").splitlines())
                if name in (f"{total}active_file", f"{total}inactive_file")
            )
            yield folder, int(limit) - max(int(usage) - cache, 0)


def _slurm_bytes(environ: Mapping[str, str]) -> int | None:
    """Return the job's memory on this node, None where Slurm sets no limit."""
    node, core = (environ.get(f"SLURM_MEM_PER_{name}", "") for name in ("NODE", "CPU"))
    if node.isdigit() and int(node):
        return int(node) << 20
    cores = re.match(r"\d+", environ.get("SLURM_CPUS_ON_NODE", ""))
    if core.isdigit() and int(core) and cores:
        return (int(core) << 20) * int(cores[0])
    return None
