"""How near a prefill step comes to the machine's GEMM peak, part by part, and what a wide decode step costs beside it.

Physics: with 2,048 tokens a step every weight meets hundreds of tokens, so arithmetic is the ceiling: 2 FLOPs for each
active weight and token, and 4 * W for each query head and token seen.  A part without useful FLOPs (norms, rotation,
sampling, Python) only takes time.  A decode step of 256 sequences meets each expert with 32 tokens: still arithmetic,
if the experts' weights stream as fast as they are used.

Real steps of one rank on Work A's model: prompts of 1,000 to 1,100 tokens in steps of 2,048, then 256 short sequences
that decode together (their attention is left out of the figures, because it depends on the context).  Every part is
timed from outside, without what other parts inside it take.  The peak is measured before and after every step
(gauge.py), for it moves on a shared machine; a share is useful FLOPs / (seconds * peak), the median of the steps.
Prints tables, then one JSON line.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from gauge import gauged
from line import Limit, print_line
from roofline import flops
from watch import Step, replaced
from work import WORK_A, Lengths, ModelShape, Work, make_work, run_job, write_requests

from bgmpi.kernels import open_backend
from bgmpi.model import Model
from bgmpi.moe import Router
from bgmpi.rank import Rank
from bgmpi.sampling import Sampler
from bgmpi.sequence_manager import SequenceManager
from bgmpi.step_plan import StepPlan

SHARE_OF_PEAK = 0.60
STEP_TOKENS = 2048
DECODING = 256
PROMPTS = Lengths(requests=12, shortest=1000, longest=1100, median=1, p95=1, p99_ratio=1.0, most_ratio=1.0)
SHORT = Lengths(requests=DECODING, shortest=8, longest=8, median=13, p95=13, p99_ratio=1.0, most_ratio=1.0)


@dataclass(slots=True)
class Timed:
    """One step.  seconds: of the whole; parts: seconds of each, without those inside it."""

    step: Step
    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))


@dataclass(slots=True)
class Timer:
    """Adds time to parts; a part that others run inside is charged only for the rest, a `whole` one for all."""

    steps: list[Timed] = field(default_factory=list)
    _inside: list[float] = field(default_factory=list)
    _whole: bool = False

    def timed(self, part: str, *, whole: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return what wraps a method so that its time is added to `part` of the newest step."""

        def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
            def timed_call(*arguments: Any, **options: Any) -> Any:
                if self._whole or not self.steps:
                    return call(*arguments, **options)
                self._inside.append(0.0)
                self._whole, begun = whole, time.perf_counter()
                result = call(*arguments, **options)
                spent = time.perf_counter() - begun
                self._whole, within = False, self._inside.pop()
                if self._inside:
                    self._inside[-1] += spent
                self.steps[-1].parts[part] += spent - within
                return result

            return timed_call

        return wrap

    def plan(self, call: Callable[[SequenceManager], StepPlan | None]) -> Callable[[SequenceManager], Any]:
        """Wrap the choice of a step: it begins one."""

        def plan(manager: SequenceManager) -> StepPlan | None:
            begun = time.perf_counter()
            found = call(manager)
            if found is not None:
                self.steps.append(Timed(Step(found, manager.active_set.prompt[found.slots], begun)))
                self.steps[-1].parts["plan"] = time.perf_counter() - begun
            return found

        return plan

    def step(self, call: Callable[..., None]) -> Callable[..., None]:
        """Wrap a step: what no part was charged for is `other`."""
        inside = self.timed("other")(call)

        def step(*arguments: Any) -> None:
            inside(*arguments)
            if arguments[1] is not None:
                self.steps[-1].seconds = sum(self.steps[-1].parts.values())

        return step


@contextmanager
def timed_parts(threads: int) -> Iterator[Timer]:
    """Time the parts of every step of the jobs that run inside the block."""
    timer, backend = Timer(), open_backend("cpu", None, threads)
    # Of the form that the model's weights have: 32 rows of gate and up, an expert of 16 x 32.
    weight = torch.zeros(32, 32, dtype=torch.bfloat16)
    of_backend = {"attend": "attention", "rotate": "rotate", "append": "append", "rms_norm": "norms",
                  "plan_attention": "plan", "exchange": "exchange", "give_back": "exchange"}
    parts: list[tuple[type, str, str, bool]] = [
        *((type(backend), name, part, False) for name, part in of_backend.items()),
        (type(backend.linear(weight)), "__call__", "projections", False),
        (type(backend.experts([weight], [weight[:, :16]])), "__call__", "experts", True),
        (Router, "__call__", "router", True), (Model, "embed", "embed", True), (Model, "_logits", "head", True),
        (Sampler, "draw", "draw", True),
    ]
    with ExitStack() as stack:
        for owner, name, part, whole in parts:
            stack.enter_context(replaced(owner, name, timer.timed(part, whole=whole)))
        stack.enter_context(replaced(SequenceManager, "plan", timer.plan))
        stack.enter_context(replaced(Rank, "_step", timer.step))
        yield timer


def useful(shape: ModelShape, step: Step) -> dict[str, float]:
    """Return the FLOPs of a step by part, as roofline.py counts them."""
    rows, drawn = np.ones(len(step.plan.ids), bool), int(step.plan.emits.sum())
    tokens = 2.0 * shape.layers * len(rows)
    parts = {
        "projections": tokens * shape.hidden * shape.head * (2 * shape.heads + 2 * shape.kv_heads),
        "router": tokens * shape.experts * shape.hidden,
        "experts": tokens * shape.active * 3 * shape.hidden * shape.inner,
        "head": 2.0 * drawn * shape.hidden * shape.vocab,
    }
    return {**parts, "attention": flops(shape, step, rows, drawn) - sum(parts.values())}


def run_steps(work: Work, folder: Path, threads: int) -> tuple[list[Timed], list[float]]:
    """Run `work` once in this process -> its steps, and the FLOP/s that the machine could do around each."""
    model, _ = make_work(work)
    requests = write_requests(work.lengths, work.shape.vocab, folder / "requests.jsonl")
    with timed_parts(threads) as timer, gauged() as gauge:
        summary = run_job(model, requests, folder / "out.h5", threads)
    gc.collect()
    if summary.failed:
        raise SystemExit(f"work {work.name}: {summary.failed} rows failed: the benchmark would mean nothing")
    return timer.steps, gauge.ceilings()[:, 0].tolist()


def print_parts(name: str, shape: ModelShape, steps: list[Timed], peaks: list[float]) -> dict[str, float]:
    """Print what each part of these like steps takes and reaches; return the figures."""
    whole = [step.seconds for step in steps]
    work = [useful(shape, step.step) for step in steps]
    print(f"{name}: {len(steps)} steps of {len(steps[0].step.plan.ids)} tokens, median "
          f"{1e3 * statistics.median(whole):.0f} ms; peak {statistics.median(peaks) / 1e9:.0f} GFLOP/s\n"
          f"{'part':>12} {'ms':>8} {'of the step':>12} {'of the peak':>12}")
    figures = {}
    for part in sorted({part for step in steps for part in step.parts}, key=lambda part: -steps[0].parts[part]):
        spent = [step.parts[part] for step in steps]
        reached = statistics.median(
            flop.get(part, 0.0) / (took * peak) if took else 0.0
            for flop, took, peak in zip(work, spent, peaks, strict=True)
        )
        share = statistics.median(took / all_of for took, all_of in zip(spent, whole, strict=True))
        print(f"{part:>12} {1e3 * statistics.median(spent):>8.2f} {100 * share:>10.1f} % "
              + (f"{100 * reached:>10.1f} %" if reached else ""))
        figures[f"{name}_{part}_ms"] = 1e3 * statistics.median(spent)
        if reached:
            figures[f"{name}_{part}_of_peak"] = reached
    for word, left_out in (("share", ()), ("share_without_attention", ("attention",))):
        figures[f"{name}_{word}"] = statistics.median(
            sum(flop for part, flop in flops_of.items() if part not in left_out)
            / ((step.seconds - sum(step.parts[part] for part in left_out)) * peak)
            for flops_of, step, peak in zip(work, steps, peaks, strict=True)
        )
        print(f"{word.replace('_', ' ')} of the peak: {figures[f'{name}_{word}']:.3f}")
    return figures


def main() -> None:
    """Measure, print, and say whether the limit holds."""
    parser = argparse.ArgumentParser(description="How near does a prefill step come to the GEMM peak?")
    parser.add_argument("--quick", action="store_true", help="fewer prompts")
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    shape, figures = WORK_A.shape, {}
    with tempfile.TemporaryDirectory(prefix="bgmpi-prefill-") as folder:
        few = Work("few", shape, replace(SHORT, requests=8))
        run_steps(few, Path(folder), asked.threads)  # compiles, fills the page cache
        prompts = replace(PROMPTS, requests=6) if asked.quick else PROMPTS
        steps, peaks = run_steps(Work("prompts", shape, prompts), Path(folder), asked.threads)
        full = [i for i, step in enumerate(steps) if len(step.step.plan.ids) == STEP_TOKENS]
        figures |= print_parts("prefill", shape, [steps[i] for i in full], [peaks[i] for i in full])
        steps, peaks = run_steps(Work("short", shape, SHORT), Path(folder), asked.threads)
        wide = [i for i, step in enumerate(steps) if len(step.step.plan.ids) == DECODING == len(step.step.plan.slots)]
        figures |= print_parts("decode", shape, [steps[i] for i in wide], [peaks[i] for i in wide])
    limits = [Limit("prefill_share_of_peak", figures["prefill_share"], SHARE_OF_PEAK, ">=")]
    print_line("prefill", figures, limits, quick=asked.quick)


if __name__ == "__main__":
    main()
