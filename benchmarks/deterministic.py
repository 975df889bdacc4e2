"""Answers: what `--deterministic` costs.

Physics: plain products go through the library, which blocks them as suits the batch; deterministic ones through the
project's dot kernels, whose order of a row's sum is fixed.  These meet the library's speed where memory bounds (few
tokens) and come near it where arithmetic does, because bfloat16 has the machine's pair product; what is left is
attention of prompts, a few query rows at a time instead of whole products.  On several ranks every active expert's row
comes home by itself, which one rank does not show: A rows a token instead of at most one a rank.

The same job with and without the flag, taking turns in one run: prompts of 1,700 to 2,000 tokens and two tokens an
answer (long prefill), shorter ones (prefill), short prompts and longer answers (decode), in bfloat16 and in float32.
BCT is from the moment the weights are loaded to the published results file; a ratio is the median of the pairs.
Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from line import print_line
from work import SMALL, Lengths, Work, make_work, run_job, write_requests

KINDS = {
    "long prefill": Lengths(requests=4, shortest=1700, longest=2000, median=2, p95=2, p99_ratio=1.0, most_ratio=1.0),
    "prefill": Lengths(requests=24, shortest=192, longest=448, median=2, p95=2, p99_ratio=1.0, most_ratio=1.0),
    "decode": Lengths(requests=64, shortest=8, longest=16, median=24, p95=24, p99_ratio=1.0, most_ratio=1.0),
}
SWITCHES = ("off", "on")


def seconds_of(work: Work, folder: Path, threads: int, dtype: str, switch: str) -> float:
    """Run `work` once in this process and return its BCT without loading."""
    model, requests = make_work(work)
    summary = run_job(model, requests, folder / "out.h5", threads, "--dtype", dtype, "--deterministic", switch)
    if summary.failed:
        raise SystemExit(f"work {work.name}: {summary.failed} rows failed: the benchmark would mean nothing")
    gc.collect()
    return summary.seconds - summary.load_seconds


def warm_up(folder: Path, threads: int, dtype: str) -> None:
    """Compile the kernels of both kinds."""
    model, _ = make_work(SMALL)
    few = write_requests(replace(KINDS["prefill"], requests=2, longest=200), SMALL.shape.vocab, folder / "few.jsonl")
    for switch in SWITCHES:
        run_job(model, few, folder / "few.h5", threads, "--dtype", dtype, "--deterministic", switch)
    gc.collect()


def compare(folder: Path, threads: int, repeats: int, *, quick: bool) -> dict[str, float]:
    """Run every kind with and without the flag, taking turns; print a row each, return the figures."""
    figures: dict[str, float] = {}
    print(f"{'dtype':>9} {'work':>12} {'plain s':>8} {'deterministic s':>16} {'ratio':>6}  pairs")
    for dtype in ("bfloat16", "float32"):
        warm_up(folder, threads, dtype)
        for name, lengths in KINDS.items():
            asked = replace(lengths, requests=max(2, lengths.requests // 3)) if quick else lengths
            work = replace(SMALL, name=name, lengths=asked)
            runs = [[seconds_of(work, folder, threads, dtype, switch) for switch in SWITCHES] for _ in range(repeats)]
            plain, steady = (statistics.median(pair[side] for pair in runs) for side in (0, 1))
            pairs = [pair[1] / pair[0] for pair in runs]
            ratio = statistics.median(pairs)
            print(f"{dtype:>9} {name:>12} {plain:>8.2f} {steady:>16.2f} {ratio:>6.2f}  "
                  + ", ".join(f"{pair:.2f}" for pair in pairs))
            kind = f"{name.replace(' ', '_')}_{dtype}"
            figures |= {f"{kind}_plain_s": plain, f"{kind}_deterministic_s": steady, f"{kind}_ratio": ratio}
    return figures


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description="What does --deterministic cost?")
    parser.add_argument("--quick", action="store_true", help="a third of the requests, fewer turns")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, help="turns of each kind")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    with tempfile.TemporaryDirectory(prefix="bgmpi-deterministic-") as folder:
        repeats = asked.repeats or (2 if asked.quick else 5)
        figures = compare(Path(folder), asked.threads, repeats, quick=asked.quick)
    print_line("deterministic", figures, quick=asked.quick)


if __name__ == "__main__":
    main()
