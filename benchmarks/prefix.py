"""Shared prefixes: how many prefill tokens they save, beside what a cache saves, and what that is worth in time.

Tokens.  Four jobs in shuffled order, run by the real program on a tiny model with little KV memory; the optimum is the
whole tree's: every edge computed once, and of each sequence the prompt's last token, for its logits.  Beside it stand
one level of sharing (run, by the exact programme; computed, by the original's greedy) and an LRU cache of full pages
with the same memory, simulated (`lru_prefix`).  The last job's prefixes are together ten times the memory.  A valley is
a step of less than half of the tokens that it may have while sequences wait; where KV memory has no room for another
sequence it counts as full instead.

Time.  Work A's model, 16 groups of 16 prompts (1,000 tokens shared, 100 of their own, 50 of answer), sharing on and
off.  Physics: 41,600 of 281,600 prompt tokens are computed, and 12,800 of answers either way; if a token costs the same
everywhere the ratio is (41,600 + 12,800) / (281,600 + 12,800) = 0.185, and decoding is dearer a token than prefill but
reads the shared prefix once.  Prefill is held against the GEMM peak that is measured between its steps (`gauge`).

Parts.  The same job, and one of mixed groups (half with long answers, half with long prompts) in steps of 256 tokens,
so that prefill takes as long as the answers, with each part switched off in turn: sharing, the attention kernel that
computes a shared prefix once, the order, and memory-centric batches (instead: at most 32 requests at once).

Prints tables, then one JSON line.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from gauge import gauged
from line import Limit, print_line
from lru_prefix import Ask, lru_prefill
from numpy.typing import NDArray
from roofline import flops
from watch import replaced, watched
from work import FIRST_TOKEN, SMALL, WORK_A, Lengths, ModelShape, Work, make_work, run_job

from bgmpi import tokenising
from bgmpi.kernels import cpu_attention
from bgmpi.prefix_groups import lifted_groups
from bgmpi.prefix_tree import PrefixTreeBuilder
from bgmpi.report import Summary
from bgmpi.share_plan import one_level_tokens, share_plan
from bgmpi.unit_order import UnitOrder

PAGE_TOKENS = 64
TINY = ModelShape(hidden=64, layers=2, heads=4, kv_heads=2, head=16, experts=4, active=2, inner=64, vocab=32000,
                  positions=4096)
#: Requests that an online engine runs at once, unless told otherwise.
USUAL_RUNNING = 256
#: KV memory of the mixed job.
MIXED_PAGES = 600
#: A step of which so many tokens are prompts' counts as prefill.
PREFILL_SHARE = 0.9
_NO_LENGTHS = Lengths(requests=1, shortest=1, longest=1, median=1, p95=1)


@dataclass(frozen=True, slots=True)
class Row:
    """One request."""

    prompt: NDArray[np.int32]
    answer: int
    samples: int = 1


@dataclass(frozen=True, slots=True)
class Job:
    """A job in shuffled order; memory: tokens of KV."""

    name: str
    rows: list[Row]
    memory: int

    @property
    def logical(self) -> int:
        """Prompt tokens of all sequences."""
        return sum(len(row.prompt) * row.samples for row in self.rows)


class Writer:
    """Draws prompts of random words; texts that are to differ begin differently, so that nothing is shared by luck."""

    def __init__(self, seed: int) -> None:
        self._draw = np.random.default_rng(seed)
        self._begins = self._draw.permutation(np.arange(FIRST_TOKEN, TINY.vocab, dtype=np.int32)).tolist()

    def text(self, tokens: int) -> NDArray[np.int32]:
        """Return so many tokens."""
        text = self._draw.integers(FIRST_TOKEN, TINY.vocab, tokens).astype(np.int32)
        text[0] = self._begins.pop() if self._begins else text[0]
        return text

    def shuffled(self, name: str, rows: list[Row], memory: int) -> Job:
        """Return the job of these rows in random order."""
        return Job(name, [rows[place] for place in self._draw.permutation(len(rows)).tolist()], memory)


def groups(count: int, members: int, prefix: int, suffix: int, answer: int, seed: int) -> list[Row]:
    """Return groups that share one prefix each."""
    writer = Writer(seed)
    rows = []
    for _ in range(count):
        shared = writer.text(prefix)
        rows += [Row(np.concatenate((shared, writer.text(suffix))), answer) for _ in range(members)]
    return rows


def token_jobs(scale: int) -> list[Job]:
    """Return the four jobs, with a `scale`-th of their groups."""
    writer = Writer(7)
    books = []
    for _ in range(max(2, 24 // scale)):
        document = writer.text(1500)
        for _ in range(4):
            section = np.concatenate((document, writer.text(500)))
            books += [Row(np.concatenate((section, writer.text(60))), 8) for _ in range(8)]
    samples = [Row(writer.text(700), 16, samples=8) for _ in range(max(4, 128 // scale))]
    sixteen, regime = max(2, 64 // scale), max(40, 400 // scale)
    return [
        writer.shuffled("16-way groups", groups(sixteen, 16, 2000, 200, 8, 1), max(5, sixteen // 4) * 2304),
        writer.shuffled("document, section", books, max(4, 12 // scale) * 2304),
        writer.shuffled("8 samples", samples, max(8, 32 // scale) * 768),
        writer.shuffled("10 x the memory", groups(regime, 8, 640, 40, 8, 2), regime * 640 // 10),
    ]


def write_requests(rows: Sequence[Row], path: Path) -> Path:
    """Write the rows as greedy completions that run to their caps (samples are drawn); return `path`."""
    with open(path, "w") as file:
        for number, row in enumerate(rows):
            body = {"prompt": row.prompt.tolist(), "max_tokens": row.answer, "n": row.samples, "ignore_eos": True,
                    "temperature": 0 if row.samples == 1 else 1.0}  # fmt: skip
            one = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(one) + "\n")
    return path


# --- tokens ---------------------------------------------------------------------------------------------------------


def greedy_tokens(job: Job) -> tuple[int, int]:
    """Return the prefill tokens of the whole tree's optimum and of the original's greedy collapse."""
    shareable = [row.prompt[:-1] for row in job.rows]
    weight = np.array([row.samples for row in job.rows], np.int32)
    length = np.array([len(row.prompt) for row in job.rows], np.int64)
    builder = PrefixTreeBuilder(len(job.rows), PAGE_TOKENS)
    builder.add(np.arange(len(job.rows)), length - 1, np.concatenate(shareable))

    def read(prompts: NDArray[np.int64], ordinal: int) -> NDArray[np.int32]:
        pages = np.full((len(prompts), PAGE_TOKENS), -1, np.int32)
        for place, prompt in enumerate(prompts.tolist()):
            page = shareable[prompt][ordinal * PAGE_TOKENS : (ordinal + 1) * PAGE_TOKENS]
            pages[place, : len(page)] = page
        return pages

    tree = builder.build(weight, read)
    optimum = share_plan(tree, weight, length, mode="multi-level").optimum
    return optimum, one_level_tokens(tree, lifted_groups(tree), weight, length)


def run_tokens(job: Job, folder: Path, threads: int, mode: str) -> Summary:
    """Run a job on the tiny model with its memory."""
    model, _ = make_work(Work("tiny", TINY, _NO_LENGTHS))
    page = TINY.layers * 2 * TINY.kv_heads * PAGE_TOKENS * TINY.head * 2
    requests = write_requests(job.rows, folder / "requests.jsonl")
    summary = run_job(model, requests, folder / "results.h5", threads, "--prefix-sharing", mode, "--page-tokens",
                      str(PAGE_TOKENS), "--host-kv-memory", str(job.memory // PAGE_TOKENS * page))  # fmt: skip
    gc.collect()
    if summary.failed:
        raise SystemExit(f"{job.name}: {summary.failed} rows failed; the benchmark would mean nothing")
    return summary


def tokens_table(jobs: list[Job], folder: Path, threads: int) -> tuple[dict[str, float], list[Limit]]:
    """Run the four jobs; print the table, return figures and the limit."""
    print(f"{'prefill tokens saved, %':>24} {'sequences':>9} {'tokens':>10} {'memory':>8} {'optimum':>8} "
          f"{'run':>6} {'of it':>7} {'one level':>9} {'greedy':>7} {'LRU':>6} {'steps':>6} {'full':>5} {'valleys':>8} "
          f"{'s':>6}")
    figures: dict[str, float] = {}
    shares = []
    for job in jobs:
        logical = job.logical
        optimum, greedy = greedy_tokens(job)
        ran, one = (run_tokens(job, folder, threads, mode) for mode in ("multi-level", "one-level"))
        asks = [Ask(row.prompt, row.answer) for row in job.rows for _ in range(row.samples)]
        lru = lru_prefill(asks, pages=job.memory // PAGE_TOKENS, page_tokens=PAGE_TOKENS, running=USUAL_RUNNING)
        saved = [100 * (1 - computed / logical)
                 for computed in (optimum, ran.prompt_tokens, one.prompt_tokens, greedy, lru)]  # fmt: skip
        shares.append(saved[1] / saved[0])
        print(f"{job.name:>24} {len(asks):>9} {logical:>10,} {job.memory:>8,} {saved[0]:>8.2f} {saved[1]:>6.2f} "
              f"{100 * shares[-1]:>6.2f}% {saved[2]:>9.2f} {saved[3]:>7.2f} {saved[4]:>6.2f} "
              f"{ran.steps:>6} {ran.full_steps:>5} {ran.thin_steps - ran.full_steps:>8} "
              f"{ran.seconds - ran.load_seconds:>6.1f}", flush=True)
        name = job.name.replace(",", "").replace(" ", "_").replace("-", "_")
        for kind, value in zip(("optimum", "run", "one_level", "greedy", "lru"), saved, strict=True):
            figures[f"{name}_{kind}"] = value
        figures[f"{name}_valleys"] = float(ran.thin_steps - ran.full_steps)
    return figures, [Limit("saved_share_of_the_optimum", min(shares), 1.0, ">=")]


# --- time -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Planned:
    """Seconds that planning what is shared took."""

    seconds: float = 0.0


@contextmanager
def timed_plans() -> Iterator[Planned]:
    """Time what the tree costs in jobs that run inside the block: hashing, building, and the plan."""
    planned = Planned()

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            answer = call(*arguments, **options)
            planned.seconds += time.perf_counter() - begun
            return answer

        return timed

    with ExitStack() as stack:
        for name in ("add", "build"):
            stack.enter_context(replaced(PrefixTreeBuilder, name, wrap))
        stack.enter_context(replaced(tokenising, "share_plan", wrap))  # type: ignore[arg-type]
        yield planned


@dataclass(slots=True)
class Ran:
    """Runs of one kind."""

    seconds: list[float] = field(default_factory=list)
    summaries: list[Summary] = field(default_factory=list)

    @property
    def bct(self) -> float:
        """Median seconds from loaded weights to published results."""
        return statistics.median(self.seconds)


def run_once(model: Path, requests: Path, folder: Path, threads: int, *words: str) -> tuple[float, Summary]:
    """Run a job -> seconds without loading, and its summary."""
    summary = run_job(model, requests, folder / "results.h5", threads, *words)
    gc.collect()
    if summary.failed:
        raise SystemExit(f"{summary.failed} rows failed; the benchmark would mean nothing")
    return summary.seconds - summary.load_seconds, summary


@contextmanager
def plain_attention() -> Iterator[None]:
    """Let shared pages be attended like anybody's inside the block."""
    with replaced(cpu_attention, "find_stretches", lambda call: lambda *arguments: []):  # type: ignore[arg-type]
        yield


@contextmanager
def order_of_the_input() -> Iterator[None]:
    """Let units be read as their first rows stand inside the block."""
    with replaced(UnitOrder, "sort", lambda call: lambda order, decode: call(order, np.zeros_like(decode))):
        yield


@contextmanager
def everything() -> Iterator[None]:
    """Change nothing."""
    yield


#: Each part switched off: what is patched, and words of `bgmpi run`.
PARTS: dict[str, tuple[Callable[[], AbstractContextManager[None]], list[str]]] = {
    "everything on": (everything, []),
    "sharing off": (everything, ["--prefix-sharing", "off"]),
    "shared attention off": (plain_attention, []),
    "order off": (order_of_the_input, []),
    "32 requests at once": (everything, ["--max-num-seqs", "32"]),
}


def parts_table(
    title: str, shape: ModelShape, rows: list[Row], folder: Path, threads: int, repeats: int, *words: str
) -> dict[str, float]:
    """Run a job with each part switched off, taking turns; print the table -> BCT of each as a share of everything on,
    and seconds of planning as a share of BCT."""
    model, _ = make_work(Work(title, shape, _NO_LENGTHS))
    requests = write_requests(rows, folder / "requests.jsonl")
    runs: dict[str, Ran] = {name: Ran() for name in PARTS}
    planned = 0.0
    for _ in range(repeats):
        for name, (patch, more) in PARTS.items():
            with patch(), timed_plans() as plans:
                seconds, summary = run_once(model, requests, folder, threads, *words, *more)
            runs[name].seconds.append(seconds)
            runs[name].summaries.append(summary)
            if name == "everything on":
                planned = max(planned, plans.seconds / seconds)
    first = runs["everything on"]
    print(f"{title}: {sum(row.samples for row in rows)} sequences, "
          f"{sum(len(row.prompt) * row.samples for row in rows):,} prompt and "
          f"{sum(row.answer * row.samples for row in rows):,} answer tokens; runs each: {repeats}, median\n"
          f"{'':>24} {'BCT s':>8} {'of all on':>10} {'prompt tokens':>14} {'steps':>6} {'full':>5} {'valleys':>8}")
    figures: dict[str, float] = {"planning_share_of_bct": planned}
    for name, ran in runs.items():
        told = ran.summaries[0]
        share = statistics.median(mine / other for mine, other in zip(ran.seconds, first.seconds, strict=True))
        figures[name.replace(" ", "_")] = share
        print(f"{name:>24} {ran.bct:>8.2f} {share:>10.2f} {told.prompt_tokens:>14,} {told.steps:>6} "
              f"{told.full_steps:>5} {told.thin_steps - told.full_steps:>8}", flush=True)
    return figures


def prefill_share(model: Path, requests: Path, shape: ModelShape, folder: Path, threads: int) -> float:
    """Run a job watched -> the share of the GEMM peak that its prefill steps reach."""
    with watched() as seen, gauged() as gauge:
        run_once(model, requests, folder, threads)
    peaks = gauge.ceilings()[:, 0]
    at = np.array([step.begun for step in seen.steps])
    looks = np.diff(np.array(gauge.seconds_before_step), prepend=0.0)
    done = spent = 0.0
    for place, step in enumerate(seen.steps[:-1]):
        if step.is_prompt().mean() < PREFILL_SHARE:
            continue
        rows = np.ones(len(step.plan.ids), bool)
        done += flops(shape, step, rows, int(step.plan.emits.sum())) / peaks[place]
        spent += at[place + 1] - at[place] - looks[place]
    return done / spent


def time_tables(quick: bool, folder: Path, threads: int, repeats: int) -> tuple[dict[str, float], list[Limit]]:
    """Run the job of the limits and the mixed one; print tables, return figures and limits."""
    shape = SMALL.shape if quick else WORK_A.shape
    rows = groups(*((4, 8, 300, 40, 12) if quick else (16, 16, 1000, 100, 50)), seed=3)
    rows = [rows[place] for place in np.random.default_rng(5).permutation(len(rows)).tolist()]
    made, _ = make_work(Work("groups", shape, _NO_LENGTHS))
    share = prefill_share(made, write_requests(rows, folder / "requests.jsonl"), shape, folder, threads)
    even = parts_table("groups", shape, rows, folder, threads, repeats)
    scale = 4 if quick else 1
    mixed = groups(6, 8, 200 // scale, 50 // scale, 160 // scale, seed=4)
    mixed += groups(6, 8, 1500 // scale, 100 // scale, 8, seed=5)
    mixed = [mixed[place] for place in np.random.default_rng(6).permutation(len(mixed)).tolist()]
    page = SMALL.shape.layers * 2 * SMALL.shape.kv_heads * PAGE_TOKENS * SMALL.shape.head * 2
    memory = ["--host-kv-memory", str(MIXED_PAGES // scale * page), "--page-tokens", str(PAGE_TOKENS),
              "--max-num-batched-tokens", "256"]  # fmt: skip
    uneven = parts_table("mixed groups", SMALL.shape, mixed, folder, threads, repeats, *memory)
    ratio = 1 / even["sharing_off"]
    print(f"prefill reaches {share:.2f} of the GEMM peak measured between its steps; sharing on / off {ratio:.3f}")
    limits = [
        Limit("bct_of_sharing_off", ratio, 0.27, "<="),
        Limit("prefill_share_of_gemm_peak", share, 0.6, ">="),
        Limit("planning_share_of_bct", even["planning_share_of_bct"], 0.01, "<="),
    ]
    figures = {"bct_of_sharing_off": ratio, "prefill_share_of_gemm_peak": share}
    figures |= {f"groups_{name}": value for name, value in even.items()}
    figures |= {f"mixed_{name}": value for name, value in uneven.items()}
    return figures, limits


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description="Shared prefixes: tokens saved, time, and each part switched off.")
    parser.add_argument("--quick", action="store_true", help="few groups and the small model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=("tokens", "time"), help="one half of it")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each kind where time is measured")
    asked = parser.parse_args()
    figures: dict[str, float] = {}
    limits: list[Limit] = []
    with tempfile.TemporaryDirectory(prefix="bgmpi-prefix-") as name:
        folder = Path(name)
        if asked.only in (None, "tokens"):
            more, held = tokens_table(token_jobs(10 if asked.quick else 1), folder, asked.threads)
            figures |= more
            limits += held
        if asked.only in (None, "time"):
            more, held = time_tables(asked.quick, folder, asked.threads, asked.repeats)
            figures |= more
            limits += held
    print_line("prefix", figures, limits, quick=asked.quick)


if __name__ == "__main__":
    main()
