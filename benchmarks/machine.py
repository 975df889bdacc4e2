"""What this machine can do at most: the two ceilings that every benchmark divides by.

Physics: a large matrix product is bound by the arithmetic units, a product with few tokens by the memory that its
weights stream from.  Both are measured, never looked up, in the same run as what is compared with them, with the same
number of threads, and each is the best of several tries, because a ceiling that is too low flatters.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch

#: Side of the square product whose speed is called the peak.
SIDE = 2048
#: Bytes that one reading sweep covers: several times the largest cache in common use would hold of it.
SWEEP = 1 << 30


def best_seconds(deed: Callable[[], object], tries: int) -> float:
    """Run `deed` once unmeasured, then return the least seconds of `tries` runs."""
    deed()
    seconds = []
    for _ in range(tries):
        begin = time.perf_counter()
        deed()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def gemm_peak_flops(dtype: torch.dtype) -> float:
    """Measure the FLOP/s of a square product of side 2048: the better of torch's own and oneDNN's prepacked one."""
    x, weight = torch.randn(SIDE, SIDE).to(dtype), torch.randn(SIDE, SIDE).to(dtype)
    seconds = best_seconds(lambda: torch.nn.functional.linear(x, weight), 8)
    if dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, SIDE)
        multiply = torch.ops.mkldnn._linear_pointwise
        seconds = min(seconds, best_seconds(lambda: multiply(x, packed, None, "none", [], ""), 8))
    return 2 * SIDE**3 / seconds


def read_bandwidth() -> float:
    """Measure the bytes per second at which all threads read 1 GiB: the best of sums and of products with one token."""
    swept = torch.ones(SWEEP // 4, dtype=torch.float32)
    seconds = best_seconds(swept.sum, 8)
    matrix, vector = swept.view(-1, 4096), torch.ones(4096)
    return SWEEP / min(seconds, best_seconds(lambda: torch.mv(matrix, vector), 8))


def describe() -> str:
    """Name the processor and the threads in use."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    return f"{model}, {torch.get_num_threads()} threads"


def commit() -> str:
    """Return the short hash of the checked-out commit, with a + when files differ from it; 'unknown' outside git."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
