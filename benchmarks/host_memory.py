"""What memory that is too small costs: KV beyond the device's budget, and weights beyond the memory of the machine.

Without `--work`: the same job without a budget (KV in place), with all KV on the device, and with a device budget of a
tenth of what it needs, taking turns.  Physics: KV of decoding sequences then passes through two buffers of a layer
each, so every byte of it is copied once a step; what copying costs beside computing is the ratio.

`--work b`: Work B (see work.py), 8.7 GB of weights inside a memory cgroup of 2 GiB, one rank.  Physics: every weight is
read from disk once a sweep for the whole active set, ahead of its use, so a sweep takes the longer of reading and
computing.  The ideal is active set / max(bytes of weights that a sweep multiplies with / disk rate, FLOPs of that many
decode tokens / peak); the active set is what half the limit holds of KV at full length (341), the rest is for weights
and the program.  Prompts are not in the ideal: they should be hidden in the sweeps.  The disk's rate (requests of 8 MiB
past the page cache) and the peak are measured in the same run, just before and just after the job; their means count.
The steady speed is that of the rounds from the first answer on, in which the active set was full and new prompts rode
along; after some of them the job is ended, because how it ends tells nothing more.  With `--kv-spill` the active set
grows past memory, and computing becomes the bound.  `--ablate` switches off one thing at a time.

Prints a table, the figures that other engines reached in the same cgroup when the limit was set, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent))

import machine
import torch
from line import Limit, print_line
from memory_cgroup import Cgroup, memory_cgroup
from work import SMALL, WORK_B, LargeShape, Lengths, ModelShape, Work, make_work, run_job

import bgmpi.layout
from bgmpi.coroutine import State
from bgmpi.head import Head
from bgmpi.io.layer_files import REQUEST, LayerFiles, aligned_buffer
from bgmpi.primitives import Reported
from bgmpi.tensor_names import expected_tensors
from bgmpi.trace import read_trace

CAP = 2 << 30
SHARE_OF_IDEAL, SPILL_GAIN, TENTH_RATIO = 0.66, 1.8, 1.3
PAGE = 16
PROBE = 2 << 30
#: Share of the limit for weights that stay and the ring; what the KV and the program leave.
WEIGHTS_SHARE = 0.34
#: With KV on disk the active set may be so many times larger.
SPILL_FACTOR = 3
FULL = 0.95
#: Rounds of the steady state after which a job of Work B has shown what it can.
STEADY_ROUNDS = 12
#: Answer tok/s of other engines on Work B in the same cgroup, and the ideal of that day; they are not installed here.
OTHERS = {"accelerate, disk offload": 49.9, "llama.cpp, mmap": 33.7, "airllm": 5.8}
IDEAL_THEN = 151.0
QUICK_B = Work(
    "b, quick",
    LargeShape(hidden=1024, layers=6, heads=8, kv_heads=4, head=128, experts=16, active=2, inner=1024, vocab=32000),
    Lengths(requests=96, shortest=32, longest=32, median=16, p95=16, p99_ratio=1.0, most_ratio=1.0),
)
KV_WORK = Work("kv", SMALL.shape, Lengths(requests=96, shortest=128, longest=384, median=96, p95=160, most_ratio=1.5))


@dataclass(frozen=True, slots=True)
class Ran:
    """One job inside the cgroup.  tok_s: answer tokens a second while the active set was full; active: how many it held
    then; disk: bytes/s, peak: FLOP/s, means of before and after; read: bytes/s that the ring's reading reached; held:
    most bytes in the cgroup; seconds: of the job until then."""

    tok_s: float
    active: float
    disk: float
    peak: float
    read: float
    held: int
    seconds: float


# --- counting -------------------------------------------------------------------------------------------------------


def multiplied_bytes(shape: ModelShape) -> int:
    """Return the bytes of weights that a sweep multiplies with."""
    return 2 * shape.layers * _layer_numbers(shape, shape.experts) + 2 * shape.vocab * shape.hidden


def decode_flops(shape: ModelShape) -> float:
    """Return the FLOPs of one decode token, its attention left out."""
    return 2.0 * (shape.layers * _layer_numbers(shape, shape.active) + shape.vocab * shape.hidden)


def _layer_numbers(shape: ModelShape, experts: int) -> int:
    attention = 2 * shape.hidden * (shape.heads + shape.kv_heads) * shape.head
    return attention + experts * 3 * shape.hidden * shape.inner


def kv_bytes(shape: ModelShape, tokens: int) -> int:
    """Return the bytes of KV of so many tokens."""
    return 4 * shape.layers * shape.kv_heads * shape.head * tokens


def most_tokens(lengths: Lengths) -> int:
    """Return the length of the longest sequence."""
    return int((lengths.prompts() + lengths.answers()).max())


def disk_rate(folder: Path, at_most: int = PROBE) -> float:
    """Measure the bytes per second of plain requests to the model's files, past the page cache."""
    place = memoryview(aligned_buffer(REQUEST))  # type: ignore[arg-type]
    read, seconds = 0, 0.0
    for path in sorted(folder.glob("*.safetensors")):
        handle = os.open(path, os.O_RDONLY | os.O_DIRECT)
        begun, size = time.perf_counter(), path.stat().st_size
        for begin in range(0, min(size, at_most - read), REQUEST):
            read += os.preadv(handle, [place], begin)
        seconds += time.perf_counter() - begun
        os.close(handle)
    return read / seconds


def steady(trace: Path) -> tuple[float, float]:
    """Return answer tokens a second, and sequences active, from the first answer on: prompts of new sequences then ride
    along in every sweep, and as many come as go."""
    rounds = []
    active, ended, before = 0, 0, 0.0
    for one in read_trace(trace):
        tokens = 0
        for event in one.events:
            if isinstance(event, Reported):
                tokens += event.generated_tokens
                active += sum(_change(move.state) * len(move.sequences) for move in event.moves)
                ended += _done(event)
        rounds.append((active, tokens, one.seconds - before, ended))
        before = one.seconds
    most = max(count for count, *_ in rounds)
    middle = [(count, tokens, wall) for count, tokens, wall, ended in rounds if ended and count >= FULL * most]
    seconds = sum(wall for _, _, wall in middle)
    return sum(tokens for _, tokens, _ in middle) / seconds, statistics.mean(count for count, _, _ in middle)


def _done(report: Reported) -> int:
    return sum(len(move.sequences) for move in report.moves if move.state == State.DONE)


def _change(state: int) -> int:
    if state == State.ACTIVE:
        return 1
    return -1 if state in (State.DONE, State.FAILED, State.YIELDED) else 0


# --- inside the cgroup ----------------------------------------------------------------------------------------------


class SeenEnough(Exception):
    """The steady state was seen for long enough; how the job ends tells nothing about it."""


def run_inside(asked: argparse.Namespace) -> None:
    """Run one job in this process, which is in the cgroup already; write what was measured as JSON."""
    torch.set_num_threads(asked.threads)
    model, requests, folder = Path(asked.model), Path(asked.requests), Path(asked.folder)
    readers: list[LayerFiles] = []
    with ExitStack() as stack:
        for change in _changes(asked.inside, readers):
            stack.enter_context(change)
        looks = [(machine.gemm_peak_flops(torch.bfloat16), disk_rate(model))]
        begun = time.perf_counter()
        with suppress(SeenEnough):
            run_job(model, requests, folder / "results.h5", asked.threads, *asked.words)
        seconds = time.perf_counter() - begun
        looks.append((machine.gemm_peak_flops(torch.bfloat16), disk_rate(model)))
    peak, disk = (statistics.mean(pair) for pair in zip(*looks, strict=True))
    read = sum(one.bytes_read for one in readers) / max(1e-9, sum(one.seconds for one in readers))
    seen = {"peak": peak, "disk": disk, "read": read, "seconds": seconds}
    (folder / "seen.json").write_text(json.dumps(seen))


def _changes(variant: str, readers: list[LayerFiles]) -> Iterator[Any]:
    """Yield the patches that make a variant of the program."""

    def noted(*arguments: Any, **options: Any) -> LayerFiles:
        readers.append(LayerFiles(*arguments, **options, direct=variant != "mapped"))
        return readers[-1]

    def shallow(*arguments: Any) -> Any:
        plan = planned(*arguments)
        arch, itemsize = arguments[0], arguments[3]
        return replace(plan, ring_bytes=max(_room(arch, unit, itemsize) for unit in plan.streamed))

    planned, decide = bgmpi.layout.plan_weights, Head.decide
    steady_rounds = ended = 0

    def counted(head: Head, reports: list[Reported]) -> Any:
        nonlocal steady_rounds, ended
        ended += sum(_done(report) for report in reports)
        steady_rounds += any(report.generated_tokens for report in reports) and ended > 0
        if steady_rounds > STEADY_ROUNDS:
            raise SeenEnough
        return decide(head, reports)

    yield patch.object(Head, "decide", counted)
    yield patch.object(bgmpi.layout, "LayerFiles", noted)
    if variant == "no prefetch":
        yield patch.object(bgmpi.layout, "plan_weights", shallow)


def _room(arch: Any, unit: Any, itemsize: int) -> int:
    """Return the bytes that one unit takes in the ring."""
    expected = expected_tensors(arch)
    sizes = [sum(prod(expected[name]) for name in unit.names(arch, group)) * itemsize for group in unit.groups]
    return sum(-(-size // 4096) * 4096 + 4096 for size in sizes)


# --- Work B ---------------------------------------------------------------------------------------------------------


def run_in(cgroup: Cgroup, work: Work, folder: Path, threads: int, variant: str, words: Sequence[str]) -> Ran:
    """Run `work` once inside the cgroup."""
    model, requests = make_work(work)
    trace = folder / "trace.jsonl"
    command = [
        *cgroup.prefix(), sys.executable, str(Path(__file__).resolve()), "--inside", variant, "--threads", str(threads),
        "--model", str(model), "--requests", str(requests), "--folder", str(folder), "--words", *words,
        "--trace", str(trace),
    ]
    ended = subprocess.run(command, check=False)
    if ended.returncode:
        raise SystemExit(f"work {work.name}, {variant}: ended with {ended.returncode}; killed if that is -9: the limit")
    seen = json.loads((folder / "seen.json").read_text())
    tok_s, active = steady(trace)
    return Ran(tok_s, active, seen["disk"], seen["peak"], seen["read"], cgroup.peak_bytes(), seen["seconds"])


def _width(tokens: int) -> list[str]:
    """Return the words for so many tokens a step; no more sequences, or a step would be as wide as they are many."""
    return ["--max-num-batched-tokens", str(tokens), "--max-num-seqs", str(tokens)]


def weights_beyond_memory(
    work: Work, cap: int, threads: int, spill: str | None, ablate: bool
) -> tuple[dict[str, float], list[Limit]]:
    """Run `work` inside a cgroup of `cap` bytes; print the table, return figures and limits."""
    home = cap // 2
    active = min(home // kv_bytes(work.shape, most_tokens(work.lengths)), work.lengths.requests)
    # So many tokens a step admit prompts as fast as answers end: every sweep then hides an equal share of the prompts.
    even = active * most_tokens(work.lengths) // int(work.lengths.answers().max())
    kept = min(int(WEIGHTS_SHARE * cap), multiplied_bytes(work.shape) // 4)
    words = ["--page-tokens", str(PAGE), "--host-kv-memory", str(home), "--weight-memory", str(kept),
             *_width(even)]
    runs = [("weights through a ring", "plain", work, words)]
    if spill is not None:
        more = replace(work, lengths=replace(work.lengths, requests=SPILL_FACTOR * work.lengths.requests))
        spilling = [*words, *_width(SPILL_FACTOR * even), "--kv-spill", spill]
        runs.append(("and KV spilled to disk", "plain", more, spilling))
    if ablate:
        fewer = replace(work, lengths=replace(work.lengths, requests=min(work.lengths.requests, 2 * active)))
        runs += [("ring of one unit: no prefetch", "no prefetch", fewer, words),
                 ("mapped files, not O_DIRECT", "mapped", fewer, words)]
    print(f"work {work.name}: {multiplied_bytes(work.shape) / 1e9:.2f} GB of weights a sweep in {cap / 1e9:.2f} GB, "
          f"{kv_bytes(work.shape, most_tokens(work.lengths)) / 1e6:.2f} MB of KV a request\n"
          f"{'':>30} {'tok/s':>7} {'active':>7} {'ideal':>7} {'share':>6} {'disk GB/s':>10} {'ring GB/s':>10} "
          f"{'GFLOP/s':>8} {'peak GB':>8} {'s':>7}")
    figures: dict[str, float] = {}
    for name, variant, job, flags in runs:
        with memory_cgroup(cap) as cgroup, tempfile.TemporaryDirectory(prefix="bgmpi-memory-") as folder:
            if isinstance(cgroup, str):
                print(f"SKIPPED: no memory cgroup can be made here ({cgroup})")
                return {"skipped": 1.0}, []
            ran = run_in(cgroup, job, Path(folder), threads, variant, flags)
        sweep = max(multiplied_bytes(work.shape) / ran.disk, active * decode_flops(work.shape) / ran.peak)
        ideal = active / sweep
        print(f"{name:>30} {ran.tok_s:>7.1f} {ran.active:>7.0f} {ideal:>7.1f} {ran.tok_s / ideal:>6.2f} "
              f"{ran.disk / 1e9:>10.2f} {ran.read / 1e9:>10.2f} {ran.peak / 1e9:>8.0f} {ran.held / 1e9:>8.2f} "
              f"{ran.seconds:>7.1f}", flush=True)
        key = name.split(":")[0].replace(",", "").replace(" ", "_")
        figures |= {f"tok_s_{key}": ran.tok_s, f"share_{key}": ran.tok_s / ideal, f"disk_gb_s_{key}": ran.disk / 1e9,
                    f"peak_gflops_{key}": ran.peak / 1e9, f"seconds_{key}": ran.seconds, f"active_{key}": ran.active}
    for name, tok_s in OTHERS.items():
        print(f"{name:>30} {tok_s:>7.1f} {'':>7} {IDEAL_THEN:>7.1f} {tok_s / IDEAL_THEN:>6.2f}  when the limit was set")
    first = "weights_through_a_ring"
    limits = [Limit("share_of_ideal", figures[f"share_{first}"], SHARE_OF_IDEAL, ">=")]
    if spill is not None:
        gain = figures["tok_s_and_KV_spilled_to_disk"] / figures[f"tok_s_{first}"]
        limits.append(Limit("kv_spill_over_none", gain, SPILL_GAIN, ">="))
    return figures, limits


# --- KV beyond the device -------------------------------------------------------------------------------------------


def kv_beyond_device(work: Work, threads: int, repeats: int, ablate: bool) -> tuple[dict[str, float], list[Limit]]:
    """Run `work` with all KV on the device and with a tenth of it, taking turns; print the table."""
    model, requests = make_work(work)
    need = sum(kv_bytes(work.shape, int(total)) for total in work.lengths.prompts() + work.lengths.answers())
    budget = ["--device-memory", str(need // 10)]
    kinds = {"unlimited, in place": [], "all on the device": ["--device-memory", str(2 * need)]}
    kinds["a tenth of it"] = budget
    if ablate:
        kinds |= {"a tenth, nothing streamed": [*budget, "--stream-kv", "off"],
                  "a tenth, longest held": [*budget, "--hold-policy", "longest-decoded"]}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    with tempfile.TemporaryDirectory(prefix="bgmpi-memory-") as folder:
        run_job(model, requests, Path(folder) / "warm.h5", threads)
        for _ in range(repeats):
            for name, words in kinds.items():
                summary = run_job(model, requests, Path(folder) / "results.h5", threads, *words)
                if summary.failed:
                    raise SystemExit(f"work {work.name}, {name}: {summary.failed} rows failed")
                seconds[name].append(summary.seconds - summary.load_seconds)
    print(f"work {work.name}: {work.lengths.requests} requests need {need / 1e6:.0f} MB of KV together, all active at "
          f"once; runs each: {repeats}, median\n{'KV':>28} {'BCT s':>8} {'ratio':>9}")
    base = seconds["unlimited, in place"]
    figures = {}
    for name, each in seconds.items():
        ratio = statistics.median(one / unlimited for one, unlimited in zip(each, base, strict=True))
        print(f"{name:>28} {statistics.median(each):>8.2f} {ratio:>9.2f}")
        key = name.replace(",", "").replace(" ", "_")
        figures |= {f"bct_s_{key}": statistics.median(each), f"ratio_{key}": ratio}
    return figures, [Limit("bct_a_tenth_over_unlimited", figures["ratio_a_tenth_of_it"], TENTH_RATIO, "<=")]


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description="What memory that is too small costs.")
    parser.add_argument("--work", choices=("kv", "b"), default="kv", help="b: weights beyond memory, in a cgroup")
    parser.add_argument("--quick", action="store_true", help="small models, few requests")
    parser.add_argument("--ablate", action="store_true", help="also with one thing switched off at a time")
    parser.add_argument("--kv-spill", metavar="DIR", help="work b: also with KV on the disk of this folder")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    for name in ("inside", "model", "requests", "folder"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    parser.add_argument("--words", nargs=argparse.REMAINDER, default=[], help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inside:
        run_inside(asked)
        return
    torch.set_num_threads(asked.threads)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the cgroup is removed
    if asked.work == "b":
        work, cap = (QUICK_B, CAP) if asked.quick else (WORK_B, CAP)
        figures, limits = weights_beyond_memory(work, cap, asked.threads, asked.kv_spill, asked.ablate)
        print_line("host_memory_work_b", figures, [] if asked.quick else limits, quick=asked.quick)
        return
    work = replace(KV_WORK, lengths=replace(KV_WORK.lengths, requests=32)) if asked.quick else KV_WORK
    figures, limits = kv_beyond_device(work, asked.threads, 1 if asked.quick else asked.repeats, asked.ablate)
    print_line("host_memory", figures, limits, quick=asked.quick)


if __name__ == "__main__":
    main()
