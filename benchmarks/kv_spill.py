"""Answers: what does the disk tier of KV deliver, against plain sequential requests to the same disk.

Physics: a disk gives its full rate to large requests one after the other that pass the page cache by.  KV is asked for
in pages of 32 to 128 KB.  A sweep reads a layer's pages in the order in which they lie there, into memory pages that
lie anywhere, so neighbours can go in one request: that should be as fast as the plain read.  Pages that were freed and
taken again lie scattered; in runs of some pages, if all goes well, else alone, and then the disk's latency counts.

Ceiling: requests of 8 MiB from one thread into one buffer, just before and just after each measurement.  The ratio is
the middle one of several rounds.  "unaligned" are pages that do not begin at a multiple of 4096 bytes in memory, as
those of an ordinary tensor: they take the way through a buffer.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from line import print_line
from numpy.typing import NDArray

from bgmpi.io.kv_spill import KvSpill

CHUNK = 8 << 20
RUN = 8
OPERATIONS = 8


def huge_memory(size: int) -> mmap.mmap:
    """Return `size` bytes in huge pages, each already there."""
    held = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held.madvise(mmap.MADV_HUGEPAGE)
    np.frombuffer(held, dtype=np.uint8)[:] = 1
    return held


class Plain:
    """A file of `size` bytes that is written and read from end to end by direct requests."""

    def __init__(self, folder: Path, size: int) -> None:
        self._file = tempfile.TemporaryFile(buffering=0, dir=folder)  # noqa: SIM115
        self._handle = os.open(f"/proc/self/fd/{self._file.fileno()}", os.O_RDWR | os.O_DIRECT)
        self._buffer = huge_memory(CHUNK)
        self._size = size
        self.rate("write")

    def rate(self, what: str) -> float:
        """Return bytes a second of one pass."""
        call = os.pwritev if what == "write" else os.preadv
        begin = time.perf_counter()
        for offset in range(0, self._size, CHUNK):
            call(self._handle, [self._buffer], offset)
        return self._size / (time.perf_counter() - begin)


def orders(pages: int) -> dict[str, NDArray[np.int64]]:
    """Name the orders in which disk pages are asked for."""
    random = np.random.default_rng(0)
    runs = random.permutation(pages // RUN)[:, None] * RUN + np.arange(RUN)
    return {"sweep": np.arange(pages), f"runs_of_{RUN}": runs.ravel(), "scattered": random.permutation(pages)}


def tier_rate(spill: KvSpill, what: str, order: NDArray[np.int64], memory: torch.Tensor) -> float:
    """Return bytes a second of one pass over the pages of a layer, in a few operations at a time."""
    deed: Callable[..., Any] = spill.write if what == "write" else spill.read
    mine = np.random.default_rng(1).permutation(len(memory))
    begin = time.perf_counter()
    receipts = [deed(0, part, memory, mine) for part in order.reshape(OPERATIONS, -1)]
    for receipt in receipts:
        receipt.wait()
    return len(order) * spill.page_bytes / (time.perf_counter() - begin)


def compared(plain: Plain, what: str, deed: Callable[[], float], rounds: int) -> tuple[float, float]:
    """Return the middle rate of `deed`, and its middle share of the plain rate around it."""
    rates, shares = [], []
    before = plain.rate(what)
    for _ in range(rounds):
        rate, after = deed(), plain.rate(what)
        rates.append(rate)
        shares.append(2 * rate / (before + after))
        before = after
    return statistics.median(rates), statistics.median(shares)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to be measured")
    parser.add_argument("--threads", type=int, default=2, help="threads of the tier")
    asked = parser.parse_args()
    size, rounds = (256 << 20, 3) if asked.quick else (1 << 30, 5)
    plain = Plain(asked.folder, size)
    room = torch.frombuffer(huge_memory(size // OPERATIONS + mmap.PAGESIZE), dtype=torch.uint8)
    figures: dict[str, Any] = {"threads": asked.threads}
    print(f"{'pages':>8} {'order':>12} {'memory':>10} {'write':>10} {'of plain':>9} {'read':>10} {'of plain':>9}")
    for page in (32 << 10, 64 << 10, 128 << 10):
        spill = KvSpill(asked.folder, 0, pages=size // page, layers=1, page_bytes=page, threads=asked.threads)
        for shift, memory in ((0, "aligned"), (64, "unaligned")):
            held = room[shift : shift + size // OPERATIONS].view(-1, page)
            for name, order in orders(size // page).items():
                if shift and name != "sweep":
                    continue
                cells = []
                for what in ("write", "read"):
                    rate, share = compared(
                        plain, what, lambda w=what, o=order, s=spill, h=held: tier_rate(s, w, o, h), rounds
                    )
                    figures[f"{what}_{page >> 10}KB_{name}_{memory}_of_plain"] = share
                    cells.append(f"{rate / 1e9:5.2f} GB/s {share:9.2f}")
                print(f"{page >> 10:5} KB {name:>12} {memory:>10} {' '.join(cells)}")
        figures["direct"] = spill.direct
        spill.close()
    figures["plain_read_GB_per_s"] = plain.rate("read") / 1e9
    figures["plain_write_GB_per_s"] = plain.rate("write") / 1e9
    print_line("kv_spill", figures, quick=asked.quick)


if __name__ == "__main__":
    main()
