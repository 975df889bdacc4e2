"""Say how near the CPU's kernels come to what the machine can do.

Physics: a linear layer of T tokens does 2 * T FLOPs for each weight it reads, so with few tokens the memory is the
ceiling (read bandwidth) and with many the arithmetic (GEMM peak); the roofline is the slower of the two.  Attention of
single tokens reads each cached key and value once: bandwidth again.  Weights and pages rotate over more memory than a
core's caches hold, as layers do.  The baseline is plain torch (F.linear) on the same shapes in the same run; shapes are
those of Work A (hidden 1024, 16 experts of 1536, top-2).  Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import machine
import numpy as np
import torch

from bgmpi.kernels import open_backend
from bgmpi.kernels.backend import Backend

HIDDEN, INNER, EXPERTS, ACTIVE = 1024, 1536, 16, 2
NAMES = {torch.bfloat16: "bf16", torch.float32: "f32"}
Figures = dict[str, float]


def best_rotating(deeds: list[Callable[[int], object]], copies: int, seconds: float) -> list[float]:
    """Return the least seconds of each deed; they take turns, each time on the next copy."""
    best, turn = [float("inf")] * len(deeds), 0
    for deed in deeds:
        deed(0)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for index, deed in enumerate(deeds):
            begin = time.perf_counter()
            deed(turn % copies)
            best[index] = min(best[index], time.perf_counter() - begin)
        turn += 1
    return best


def row(name: str, tokens: int, seconds: float, size: float, flops: float, ceiling: tuple[float, float],
        plain: float | None = None) -> float:
    """Print one line of the table; return the share of the roofline that was reached."""
    peak, bandwidth = ceiling
    share = max(size / bandwidth, flops / peak) / seconds
    against = "" if plain is None else f"{plain / seconds:6.2f}x torch"
    print(f"{name:<24}{tokens:>6} tokens {seconds * 1e6:9.1f} us {size / seconds / 1e9:7.1f} GB/s "
          f"{flops / seconds / 1e9:8.1f} GFLOP/s {100 * share:5.0f} % of roofline {against}")
    return share


def linears(backend: Backend, dtype: torch.dtype, ceiling: tuple[float, float], quick: bool) -> Figures:
    """Linear layers of Work A's expert shape, against F.linear."""
    figures = {}
    size = 2 * INNER * HIDDEN * dtype.itemsize
    copies = (64 << 20 if quick else 400 << 20) // size
    weights = [torch.randn(2 * INNER, HIDDEN).to(dtype) for _ in range(copies)]
    prepared = [backend.linear(weight) for weight in weights]
    for tokens in (1, 4, 8, 64, 512) if quick else (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048):
        x = torch.randn(tokens, HIDDEN).to(dtype)
        ours, plain = best_rotating(
            [lambda i, x=x: prepared[i](x), lambda i, x=x: torch.nn.functional.linear(x, weights[i])],
            len(weights), 0.4 if quick else 1.5,
        )
        flops = 2.0 * tokens * 2 * INNER * HIDDEN
        share = row(f"linear {NAMES[dtype]}", tokens, ours, size, flops, ceiling, plain)
        figures[f"linear_{NAMES[dtype]}_{tokens}_share"] = round(share, 3)
    return figures


def experts(backend: Backend, dtype: torch.dtype, ceiling: tuple[float, float], quick: bool) -> Figures:
    """The experts of one layer of Work A; bytes are the weights of the experts that tokens chose."""
    figures = {}
    layers = 1 if quick else 3
    prepared = [
        backend.experts(
            [torch.randn(2 * INNER, HIDDEN).to(dtype) for _ in range(EXPERTS)],
            [torch.randn(HIDDEN, INNER).to(dtype) for _ in range(EXPERTS)],
        )
        for _ in range(layers)
    ]
    for tokens in (1, 8, 64, 512) if quick else (1, 2, 4, 8, 16, 64, 128, 512, 2048):
        x = torch.randn(tokens, HIDDEN).to(dtype)
        choices = [torch.rand(tokens, EXPERTS).argsort(1)[:, :ACTIVE].int().contiguous() for _ in range(layers)]
        share = torch.full((tokens, ACTIVE), 0.5)
        ours, = best_rotating(
            [lambda i, x=x, choices=choices, share=share: prepared[i](x, choices[i], share)], layers,
            0.4 if quick else 1.5,
        )
        touched = np.mean([len(choice.unique()) for choice in choices])
        size = float(touched) * 3 * INNER * HIDDEN * dtype.itemsize
        flops = 2.0 * tokens * ACTIVE * 3 * INNER * HIDDEN
        reached = row(f"experts {NAMES[dtype]}", tokens, ours, size, flops, ceiling)
        figures[f"experts_{NAMES[dtype]}_{tokens}_share"] = round(reached, 3)
    return figures


def attention(backend: Backend, dtype: torch.dtype, ceiling: tuple[float, float], quick: bool) -> Figures:
    """Single-token attention of Work A's heads over sequences of 300 tokens."""
    figures = {}
    cached, page_tokens, groups, heads, width = 300, 64, 4, 16, 64
    each = -(-cached // page_tokens)
    for sequences in (1, 64) if quick else (1, 8, 64, 256):
        pages = np.arange(sequences * each, dtype=np.int32).reshape(sequences, each)
        plan = backend.plan_attention(
            np.arange(sequences + 1, dtype=np.int32), np.full(sequences, cached - 1, np.int32), pages, page_tokens
        )
        layers = [torch.randn(sequences * each, 2, groups, page_tokens, width).to(dtype) for _ in range(4)]
        query = torch.randn(sequences, heads, width).to(dtype)
        ours, = best_rotating(
            [lambda i, query=query, layers=layers, plan=plan: backend.attend(query, layers[i], plan, 0.125, 0)],
            len(layers), 0.4 if quick else 1.0,
        )
        size = 2.0 * sequences * cached * groups * width * dtype.itemsize
        flops = 4.0 * sequences * cached * heads * width
        reached = row(f"attention {NAMES[dtype]}", sequences, ours, size, flops, ceiling)
        figures[f"attention_{NAMES[dtype]}_{sequences}_share"] = round(reached, 3)
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Say how near the CPU's kernels come to what the machine can do.")
    parser.add_argument("--quick", action="store_true", help="fewer shapes, shorter tries, under a minute")
    parser.add_argument("--threads", type=int, default=2, help="threads to use (default 2)")
    options = parser.parse_args()
    backend = open_backend("cpu", None, options.threads)
    bandwidth = machine.read_bandwidth()
    figures: Figures = {"read_bandwidth_gb_s": round(bandwidth / 1e9, 1)}
    print(f"{machine.describe()}: reads {bandwidth / 1e9:.1f} GB/s")
    for dtype in NAMES:
        peak = machine.gemm_peak_flops(dtype)
        figures[f"gemm_peak_{NAMES[dtype]}_gflop_s"] = round(peak / 1e9)
        print(f"\n{NAMES[dtype]}: peak {peak / 1e9:.0f} GFLOP/s")
        for part in (linears, experts, attention):
            figures |= part(backend, dtype, (peak, bandwidth), options.quick)
    print(json.dumps({
        "benchmark": "kernels", "machine": machine.describe(), "commit": machine.commit(), "quick": options.quick,
        "figures": figures, "limits": [],
    }))


if __name__ == "__main__":
    main()
