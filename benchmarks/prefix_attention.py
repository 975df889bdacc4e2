"""Say what attention gains from pages that many sequences share, and how near attention of prompts comes to the peak.

Physics: a group of 16 that decodes behind 2,000 common tokens reads the same keys and values 16 times.  Read once, they
meet 16 x (heads of a key) queries, so the work becomes two matrix products and the arithmetic is the bound.  The plain
kernel is the same call on private copies of the pages: equal bytes, distinct numbers; the two take turns in one run and
are compared by their medians (and by their lower quartiles, which a neighbour on the machine disturbs less).  Full
pages alone are shared: of 2,000 tokens in pages of 64, 1,984; each member has the other 16 as a copy of its own, and 1
to 100 tokens behind them.

Prompts are held against the GEMM peak of the same run and number format (only what is seen counts as work), and against
torch's own fused attention, which gets its keys and values laid out and repeated for all heads beforehand.

The limit is issue 5's: at least 4 x the plain kernel for Work A's heads (16 query, 4 key heads of 64, bfloat16).
Prints two tables, then one JSON line.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import machine
import numpy as np
import torch
from line import Limit, print_line
from numpy.typing import NDArray

from bgmpi.kernels import open_backend
from bgmpi.kernels.backend import Backend

NAMES = {torch.bfloat16: "bf16", torch.float32: "f32"}
MEMBERS, PREFIX, LONGEST_SUFFIX, PAGE = 16, 2000, 100, 64
#: Columns of a latent row that are no values.
ROTARY = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads of a model: `groups` key-value heads of `width`, or 0: one latent row of `width` for all."""

    name: str
    heads: int
    groups: int
    width: int

    def pages(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return `count` pages of noise."""
        one = (2, self.groups, PAGE, self.width) if self.groups else (PAGE, self.width)
        return torch.randn(count, *one).to(dtype)

    def attend(self, backend: Backend, query: torch.Tensor, pages: torch.Tensor, plan: object) -> torch.Tensor:
        """Call the backend as a layer of such a model does."""
        if self.groups:
            return backend.attend(query, pages, plan, self.width**-0.5, 0)
        return backend.attend_latent(query, pages, plan, self.width**-0.5, self.width - ROTARY)

    @property
    def flops(self) -> float:
        """FLOPs of one query token and one cached token."""
        return 2.0 * self.heads * (2 * self.width if self.groups else 2 * self.width - ROTARY)


SHAPES = [
    Shape("GQA 16/4/64", 16, 4, 64), Shape("GQA 32/8/128", 32, 8, 128), Shape("MHA 32/32/128", 32, 32, 128),
    Shape("MLA 16/576", 16, 0, 576), Shape("MLA 128/576", 128, 0, 576),
]
WORK_A = SHAPES[0]


def quartiles(deeds: list[Callable[[], object]], seconds: float, least: int) -> list[tuple[float, float]]:
    """Return lower quartile and median of each deed's seconds; they take turns for so long, and at least so often."""
    for deed in deeds:
        deed()
    times: list[list[float]] = [[] for _ in deeds]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < least:
        for deed, taken in zip(deeds, times, strict=True):
            begin = time.perf_counter()
            deed()
            taken.append(time.perf_counter() - begin)
    return [(quarter, median) for quarter, median, _ in map(statistics.quantiles, times)]


def tables(sequences: int, each: int, shared: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return page tables [sequences, each]: all private, and with the first `shared` pages those of sequence 0."""
    private = np.arange(sequences * each, dtype=np.int32).reshape(sequences, each)
    common = private.copy()
    common[:, :shared] = private[0, :shared]
    return private, common


def decode(backend: Backend, shape: Shape, dtype: torch.dtype, seconds: float) -> list[tuple[float, float]]:
    """Measure one token of each member -> lower quartile and median seconds, plain and behind shared pages."""
    behind = np.linspace(1, LONGEST_SUFFIX, MEMBERS).astype(np.int32)
    each = -(-(PREFIX + LONGEST_SUFFIX) // PAGE)
    private, common = tables(MEMBERS, each, PREFIX // PAGE)
    pages = shape.pages(private.size, dtype)
    pages[private[1:, : PREFIX // PAGE].astype(np.int64)] = pages[private[0, : PREFIX // PAGE].astype(np.int64)]
    query = torch.randn(MEMBERS, shape.heads, shape.width).to(dtype)
    plans = [
        backend.plan_attention(np.arange(MEMBERS + 1, dtype=np.int32), PREFIX + behind - 1, table, PAGE)
        for table in (private, common)
    ]
    plain, shared = (shape.attend(backend, query, pages, plan).double() for plan in plans)
    gap = float((plain - shared).abs().max() / plain.abs().max())
    if not gap < (0.01 if dtype == torch.bfloat16 else 1e-5):
        raise SystemExit(f"prefix_attention: {shape.name} {dtype}: results differ by {gap:.2g} of the largest")
    return quartiles([lambda p=p: shape.attend(backend, query, pages, p) for p in plans], seconds, 9)


def prompts(
    backend: Backend, shape: Shape, dtype: torch.dtype, sequences: int, new: int, before: int, seconds: float
) -> tuple[float, float, float]:
    """Measure `new` tokens of each sequence behind `before` shared ones -> seconds, torch's seconds, FLOPs."""
    each = -(-(before + new) // PAGE)
    _, common = tables(sequences, each, before // PAGE)
    pages = shape.pages(common.size, dtype)
    query = torch.randn(sequences * new, shape.heads, shape.width).to(dtype)
    plan = backend.plan_attention(
        np.arange(sequences + 1, dtype=np.int32) * new, np.full(sequences, before, np.int32), common, PAGE
    )
    rows, keys = (torch.randn(1, shape.heads, count, shape.width).to(dtype) for count in (new, before + new))
    mask = torch.ones(new, before + new, dtype=torch.bool).tril(before)
    attention = torch.nn.functional.scaled_dot_product_attention

    def by_torch() -> None:
        for _ in range(sequences):
            if before:
                attention(rows, keys, keys, attn_mask=mask)
            else:
                attention(rows, keys, keys, is_causal=True)

    (_, ours), (_, theirs) = quartiles([lambda: shape.attend(backend, query, pages, plan), by_torch], seconds, 3)
    return ours, theirs, shape.flops * sequences * (new * before + new * (new + 1) / 2)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Say what attention gains from shared pages.")
    parser.add_argument("--quick", action="store_true", help="fewer shapes, shorter tries, under a minute")
    parser.add_argument("--threads", type=int, default=2, help="threads to use (default 2)")
    options = parser.parse_args()
    backend, seconds = open_backend("cpu", None, options.threads), 1.0 if options.quick else 4.0
    figures: dict[str, float] = {}
    print(f"{machine.describe()}\n\ndecode, {MEMBERS} members behind {PREFIX:,} shared tokens")
    for dtype in NAMES:
        for shape in SHAPES[:4] if options.quick else SHAPES:
            (low, plain), (low_shared, shared) = decode(backend, shape, dtype, seconds)
            print(f"{shape.name:<16}{NAMES[dtype]:<6}plain {plain * 1e3:8.2f} ms   shared {shared * 1e3:8.2f} ms "
                  f"{plain / shared:6.2f} x   lower quartiles {low / low_shared:6.2f} x")
            figures[f"decode {shape.name} {NAMES[dtype]} x"] = plain / shared
            figures[f"decode {shape.name} {NAMES[dtype]} lower quartiles x"] = low / low_shared
    print("\nprompts")
    cases = [(16, 100, 1000), (1, 2048, 0), (1, 2048, 2048)] if options.quick else [
        (16, 100, 1000), (4, 512, 0), (1, 2048, 0), (1, 2048, 2048), (1, 512, 4096)
    ]
    for dtype in NAMES:
        peak = machine.gemm_peak_flops(dtype)
        figures[f"gemm peak {NAMES[dtype]} GFLOP/s"] = peak / 1e9
        for shape in SHAPES[:1] if options.quick else SHAPES[:2]:
            for sequences, new, before in cases:
                ours, theirs, flops = prompts(backend, shape, dtype, sequences, new, before, seconds)
                name = f"{sequences} x {new} behind {before}"
                print(f"{shape.name:<16}{NAMES[dtype]:<6}{name:<22}{ours * 1e3:8.2f} ms {flops / ours / 1e9:7.1f} "
                      f"GFLOP/s {100 * flops / ours / peak:4.0f} % of the GEMM peak {theirs / ours:6.2f} x torch")
                figures[f"prompts {shape.name} {NAMES[dtype]} {name} share of peak"] = flops / ours / peak
    limit = Limit("decode behind a shared prefix, x plain", figures[f"decode {WORK_A.name} bf16 x"], 4.0, ">=")
    print_line("prefix_attention", figures, [limit], quick=options.quick)


if __name__ == "__main__":
    main()
