"""Batch completion time: what yield points bring, and how near a whole job comes to what the machine can do.

Without `--work`: the same job with yield points on and off, taking turns in one run.  Physics: in a decode step a
sparse layer reads every expert that any token chose.  With yield points all micro-batches of a step gather before the
experts and read them once; an atomic forward pass reads them once a micro-batch.  The attention of both runs in
micro-batches of the same size (`--b-attn`), so tokens per expert batch, and what they save, is all that differs.

`--work a`: Work A (see work.py), one rank, loading outside, against the roofline of the steps it made (roofline.py
tells how each term is counted).  Peak and bandwidth are measured in the same run: before, after, and every half second
between two steps (gauge.py), because on a shared machine they move by a factor of four.  The limit is held against the
ceilings while the job ran; the share of the best ever seen is printed beside it.  Which experts the tokens chose, and
where the time goes, comes from a watched pass of the same job, before the timed one, that must draw the same tokens.

BCT is from the moment the weights are loaded to the published results file.  Prints tables, then one JSON line.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import h5py
import machine
import numpy as np
import torch
from gauge import Gauge, gauged
from line import Limit, print_line
from roofline import Roofline, roofline
from watch import Watched, noted_executors, watched
from work import SMALL, WORK_A, Lengths, Work, make_work, run_job, write_requests

from bgmpi.report import Summary

SHARE_OF_ROOFLINE = 0.45
#: Kinds of steps by the sequences that decode in them; 0 stands for a step with prompt tokens.
KINDS = (
    ("with prompt tokens", 0, 0), ("decode of 1", 1, 1), ("decode of 2 to 4", 2, 4), ("decode of 5 to 16", 5, 16),
    ("decode of 17 to 64", 17, 64), ("decode of 65 and more", 65, 1 << 30),
)


@dataclass(frozen=True, slots=True)
class Ran:
    """One run.  seconds: BCT; expert_tokens: tokens a combined expert batch, mean."""

    seconds: float
    summary: Summary
    expert_tokens: float


def run_once(work: Work, folder: Path, threads: int, *words: str, output: str = "results.h5") -> Ran:
    """Run `work` once in this process."""
    model, requests = make_work(work)
    with noted_executors() as executors:
        summary = run_job(model, requests, folder / output, threads, *words)
    executor = executors.pop()
    gathered = executor.expert_tokens / max(1, executor.expert_batches)
    del executor
    gc.collect()
    if summary.failed or summary.generated_tokens != int(work.lengths.answers().sum()):
        raise SystemExit(f"work {work.name}: {summary.failed} rows failed, {summary.generated_tokens} tokens came; "
                         f"expected none and {int(work.lengths.answers().sum())}: the benchmark would mean nothing")
    return Ran(summary.seconds - summary.load_seconds, summary, gathered)


def warm_up(work: Work, folder: Path, threads: int) -> None:
    """Compile the kernels and fill the page cache with a few short requests."""
    model, _ = make_work(work)
    few = Lengths(requests=4, shortest=2, longest=20, median=2, p95=3, p99_ratio=1.2, most_ratio=1.5)
    run_job(model, write_requests(few, work.shape.vocab, folder / "few.jsonl"), folder / "few.h5", threads)
    gc.collect()


# --- yield points on and off ----------------------------------------------------------------------------------------


def compare(work: Work, folder: Path, threads: int, b_attn: int, repeats: int) -> dict[str, float]:
    """Run `work` with yield points on and off, taking turns; print the table, return the figures."""
    runs: dict[str, list[Ran]] = {"on": [], "off": []}
    for _ in range(repeats):
        for switch, ran in runs.items():
            ran.append(run_once(work, folder, threads, "--b-attn", str(b_attn), "--yield-points", switch))
    tokens = runs["on"][0].summary.generated_tokens
    share = work.shape.active / work.shape.experts
    print(f"work {work.name}: {work.lengths.requests} requests, {work.lengths.prompts().sum()} prompt and {tokens} "
          f"answer tokens; micro-batches of {b_attn} tokens; runs each: {repeats}, median\n"
          f"{'yield points':>12} {'BCT s':>8} {'answer tok/s':>13} {'tokens an expert batch':>23} "
          f"{'tokens an expert in it':>23}")
    figures: dict[str, float] = {}
    for switch, ran in runs.items():
        seconds, gathered = statistics.median(one.seconds for one in ran), ran[0].expert_tokens
        print(f"{switch:>12} {seconds:>8.2f} {tokens / seconds:>13.1f} {gathered:>23.1f} {gathered * share:>23.2f}")
        figures |= {f"bct_s_{switch}": seconds, f"answer_tok_s_{switch}": tokens / seconds,
                    f"tokens_an_expert_batch_{switch}": gathered, f"tokens_an_expert_{switch}": gathered * share}
    pairs = [off.seconds / on.seconds for on, off in zip(runs["on"], runs["off"], strict=True)]
    figures["bct_off_over_on"] = statistics.median(pairs)
    print(f"off / on: {figures['bct_off_over_on']:.2f} (pairs {', '.join(f'{pair:.2f}' for pair in pairs)})")
    return figures


# --- against the roofline -------------------------------------------------------------------------------------------


def ceilings() -> tuple[float, float]:
    """Measure peak FLOP/s in bfloat16 and read bytes/s."""
    return machine.gemm_peak_flops(torch.bfloat16), machine.read_bandwidth()


def same_tokens(first: Path, second: Path) -> bool:
    """Say whether two results files hold the same answers."""
    with h5py.File(first, "r") as one, h5py.File(second, "r") as other:
        names = "tokens/offsets", "tokens/values"
        return all(np.array_equal(one[name][:], other[name][:]) for name in names)


def gauged_run(work: Work, folder: Path, threads: int) -> tuple[Gauge, Ran]:
    """Run `work` with short looks at the ceilings between its steps, and take their time off."""
    with gauged() as gauge:
        ran = run_once(work, folder, threads)
    return gauge, replace(ran, seconds=ran.seconds - gauge.paused)


def against_roofline(work: Work, folder: Path, threads: int, repeats: int) -> tuple[dict[str, float], list[Limit]]:
    """Run `work` watched, then timed; print shares, return figures and the limit."""
    before = ceilings()
    with watched() as seen:
        slow = run_once(work, folder, threads, output="watched.h5")
    gauge, ran = min((gauged_run(work, folder, threads) for _ in range(repeats)), key=lambda pair: pair[1].seconds)
    after = ceilings()
    if not same_tokens(folder / "watched.h5", folder / "results.h5"):
        raise SystemExit(f"work {work.name}: the watched pass drew other tokens than the timed one and tells nothing")
    peak, bandwidth = (max(pair) for pair in zip(before, after, strict=True))
    fixed = np.broadcast_to(np.array([peak, bandwidth]), (len(seen.steps), 2))
    least = roofline(work.shape, seen.steps, fixed)
    during = gauge.ceilings()
    met = roofline(work.shape, seen.steps, during)
    print(f"work {work.name}: {work.lengths.requests} requests, {ran.summary.prompt_tokens} prompt and "
          f"{ran.summary.generated_tokens} answer tokens in {len(seen.steps)} steps ({least.decode_steps} of decode "
          f"only, {least.experts:.1f} of {work.shape.experts} experts touched a layer in them)\n"
          f"peak {peak / 1e9:.0f} GFLOP/s bf16 (before {before[0] / 1e9:.0f}, after {after[0] / 1e9:.0f}), read "
          f"{bandwidth / 1e9:.1f} GB/s (before {before[1] / 1e9:.1f}, after {after[1] / 1e9:.1f})")
    share = least.held / ran.seconds
    print(f"roofline {least.held:.2f} s (mixed steps together {least.together:.2f} s, separately {least.separate:.2f} "
          f"s; prompts {least.prompt:.2f} s); BCT {ran.seconds:.2f} s, "
          f"{ran.summary.generated_tokens / ran.seconds:.0f} answer tok/s; share {share:.3f}")
    share_met = met.separate / ran.seconds
    low, middle, high = np.percentile(during, (10, 50, 90), axis=0) / 1e9
    print(f"ceilings while the job ran (10 %, half, 90 % of its steps): {low[0]:.0f}, {middle[0]:.0f}, {high[0]:.0f} "
          f"GFLOP/s; {low[1]:.1f}, {middle[1]:.1f}, {high[1]:.1f} GB/s; roofline of these {met.separate:.2f} s (mixed "
          f"steps together {met.together:.2f} s); share {share_met:.3f}")
    figures = {
        "bct_s": ran.seconds, "share_of_best_ceilings": share, "share_while_running": share_met,
        "peak_gflops_while_running": float(middle[0]), "read_gb_s_while_running": float(middle[1]),
        "roofline_together_s": least.together,
        "roofline_separate_s": least.separate, "peak_gflops": peak / 1e9, "read_gb_s": bandwidth / 1e9,
        "answer_tok_s": ran.summary.generated_tokens / ran.seconds, "experts_touched": least.experts,
        "steps": float(len(seen.steps)), "load_s": ran.summary.load_seconds, **print_kinds(seen, least),
        **print_parts(seen, slow.seconds),
    }
    return figures, [Limit("share_of_roofline", share_met, SHARE_OF_ROOFLINE, ">=")]


def print_parts(seen: Watched, seconds: float) -> dict[str, float]:
    """Print where the watched pass spent its time; return the shares."""
    parts = dict(seen.seconds)
    parts["other"] = seconds - sum(parts.values())
    print(f"where the time goes (watched pass, {seconds:.2f} s): "
          + ", ".join(f"{name} {100 * part / seconds:.1f} %" for name, part in parts.items()))
    return {f"part_{name}": part / seconds for name, part in parts.items()}


def print_kinds(seen: Watched, least: Roofline) -> dict[str, float]:
    """Print the watched steps by how many sequences decoded in them; return each kind's share of the roofline."""
    begun = np.array([step.begun for step in seen.steps])
    walls = np.diff(begun)  # the last step has no end of its own
    wide = np.array([0 if step.is_prompt().any() else len(step.plan.slots) for step in seen.steps])[:-1]
    figures = {}
    print(f"{'steps':>22} {'number':>7} {'seconds':>8} {'roofline':>9} {'share':>6} {'ms a step':>10}")
    for name, low, high in KINDS:
        mine = (wide >= low) & (wide <= high)
        if mine.any():
            spent, bound = float(walls[mine].sum()), float(least.steps[:-1][mine].sum())
            figures[f"share_{name.replace(' ', '_')}"] = bound / spent
            print(f"{name:>22} {mine.sum():>7} {spent:>8.2f} {bound:>9.2f} {bound / spent:>6.2f} "
                  f"{1e3 * spent / mine.sum():>10.2f}")
    return figures


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description="Batch completion time: yield points on and off, or Work A.")
    parser.add_argument("--work", choices=("small", "a"), default="small", help="a: Work A against the roofline")
    parser.add_argument("--roofline", action="store_true", help="the small work against the roofline, as Work A")
    parser.add_argument("--quick", action="store_true", help="a few requests, once")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--b-attn", type=int, default=32, help="tokens of a micro-batch in the comparison")
    parser.add_argument("--repeats", type=int, help="runs of each kind")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    work = WORK_A if asked.work == "a" and not asked.quick else SMALL
    if asked.quick:
        work = replace(work, name="small, quick", lengths=replace(work.lengths, requests=64, longest=24))
    rooflined = asked.work == "a" or asked.roofline
    repeats = asked.repeats or (1 if asked.quick or rooflined else 3)
    figures: dict[str, float]
    limits: list[Limit] = []
    with tempfile.TemporaryDirectory(prefix="bgmpi-bct-") as folder:
        warm_up(work, Path(folder), asked.threads)
        if rooflined:
            figures, limits = against_roofline(work, Path(folder), asked.threads, repeats)
        else:
            figures = compare(work, Path(folder), asked.threads, asked.b_attn, repeats)
    # The limit is Work A's; another work's share is a figure only.
    print_line("bct_work_a" if rooflined else "bct", figures, limits if work is WORK_A else [], quick=asked.quick)


if __name__ == "__main__":
    main()
