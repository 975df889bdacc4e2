"""Answers: what PARTITION and MIGRATE bring at a job's end, where a few long answers keep most ranks idle.

Physics: once one sequence is left, a step reads all its weights for one token, and reading is all it does.  A group of
k ranks reads a k-th each of what it can split (attention, dense blocks, head; routed experts are spread over the ranks
anyway), so the step falls to split / k + rest + gathers, where ranks have a core and memory bandwidth each.  With more
ranks than cores a group adds no bandwidth and every gather waits for a turn on a core: then nothing can be gained, the
decision must see it, and BCT must be that of the job without groups.  Several stragglers on one rank are another
matter: a step of four costs little more than one of one, so moving them apart gains the little.

Jobs: 64 requests whose answers are log-normal about a median and end by a token, so rank 0 knows no length, only equal
caps: one straggler of 20 medians, four neighbours of 10 (the trace tells whose rank they are given), or none at all,
where nothing may be lost.  Models: dense and sparse.  All variants take turns in one launch; a ratio is that of the
shortest BCTs, loading outside.  All must draw the same tokens.  `forced` is the same job with groups flipped on and off
whatever they bring: it tells what a step over a group takes where the decision avoids it, beside what was predicted.

Busy: share of the BCT in which a rank computed tokens, its own or its group's.  The tail begins when more ranks than
stragglers have nothing left.  The baseline is the same job with PARTITION off.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import h5py
import numpy as np
from line import print_line
from numpy.typing import NDArray
from watch import replaced
from work import FIRST_TOKEN, WORK_A, Lengths, ModelShape, Work, make_work

from bgmpi.api import run_batch
from bgmpi.config import resolve
from bgmpi.primitives import Partition, Reported
from bgmpi.step_times import StepTimes
from bgmpi.trace import read_trace

END = 2  # the checkpoint's end of text
VARIANTS: dict[str, tuple[str, ...]] = {
    "everything on": (),
    "partition off": ("--partition", "off"),
    "migrate off": ("--migrate", "off"),
    "both off": ("--partition", "off", "--migrate", "off"),
    "yield points off": ("--yield-points", "off"),
}
FORCED = "forced"
BASELINE = "partition off"


@dataclass(frozen=True, slots=True)
class DenseShape(ModelShape):
    """A dense model of the Llama family, bfloat16; `experts` and `active` mean nothing."""

    def config(self) -> dict[str, Any]:
        """Return the checkpoint's config.json."""
        sparse = "num_local_experts", "num_experts_per_tok", "sliding_window"
        plain = {name: value for name, value in ModelShape.config(self).items() if name not in sparse}
        return plain | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}

    def layer_shapes(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of every tensor of a layer."""
        name = f"model.layers.{layer}"
        yield from (one for one in ModelShape.layer_shapes(self, layer) if ".block_sparse_moe." not in one[0])
        yield f"{name}.mlp.gate_proj.weight", (self.inner, self.hidden)
        yield f"{name}.mlp.up_proj.weight", (self.inner, self.hidden)
        yield f"{name}.mlp.down_proj.weight", (self.hidden, self.inner)


@dataclass(frozen=True, slots=True)
class TailLengths(Lengths):
    """Lengths without a tail but for `stragglers` neighbours of `ratio` medians, the first of them the `place`-th."""

    stragglers: int = 1
    ratio: int = 20
    place: int = 0

    def answers(self) -> NDArray[np.int64]:
        """Return the answer lengths, int64 [requests]."""
        lengths = Lengths.answers(self)
        lengths[self.place : self.place + self.stragglers] = int(self.ratio * self.median)
        return lengths

    @property
    def cap(self) -> int:
        """Tokens that every answer may have."""
        return int(2 * self.ratio * self.median)


def tail_work(name: str, shape: ModelShape, median: int, requests: int, stragglers: int, ratio: int) -> Work:
    """Return a work whose answers have this median."""
    lengths = TailLengths(requests=requests, shortest=8, longest=64, median=median, p95=2 * median, p99_ratio=1.1,
                          most_ratio=1.2, stragglers=stragglers, ratio=ratio)
    return Work(name, shape, lengths)


DENSE = DenseShape(hidden=1536, layers=8, heads=12, kv_heads=4, head=128, experts=0, active=0, inner=4096, vocab=32000)
SMALL_DENSE = DenseShape(hidden=1024, layers=6, heads=8, kv_heads=4, head=128, experts=0, active=0, inner=2816,
                         vocab=16000)
SPARSE = replace(WORK_A.shape, layers=6)


def works(quick: bool) -> list[Work]:
    """Return the jobs, the straggler's with a dense model first."""
    if quick:
        return [tail_work("dense, 1 straggler", SMALL_DENSE, 8, 24, 1, 20)]
    return [
        tail_work("dense, 1 straggler", DENSE, 24, 64, 1, 20),
        tail_work("sparse, 1 straggler", SPARSE, 24, 64, 1, 20),
        tail_work("dense, 4 stragglers", DENSE, 24, 64, 4, 10),
        tail_work("dense, no straggler", DENSE, 24, 64, 0, 10),
    ]


def request_file(work: Work, folder: Path) -> Path:
    """Write the requests: every answer ends by a token after its length, which only the sampler is told."""
    lengths = work.lengths
    assert isinstance(lengths, TailLengths)
    draw = np.random.default_rng(lengths.seed + 2)
    path = folder / f"requests-{work.name.replace(' ', '-').replace(',', '')}.jsonl"
    with open(path, "w") as file:
        for number, (prompt, answer) in enumerate(zip(lengths.prompts(), lengths.answers(), strict=True)):
            body = {
                "prompt": draw.integers(FIRST_TOKEN, work.shape.vocab, int(prompt)).tolist(), "temperature": 0,
                "max_tokens": lengths.cap, "min_tokens": int(answer), "logit_bias": {str(END): 100},
            }
            one = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(one) + "\n")
    return path


# --- inside the launch ------------------------------------------------------------------------------------------------


@contextmanager
def noted_times(kept: list[StepTimes]) -> Iterator[None]:
    """Keep rank 0's step times of every job inside the block."""

    def wrap(note: Any) -> Any:
        def noting(times: StepTimes, *words: Any) -> None:
            if times not in kept:
                kept.append(times)
            note(times, *words)

        return noting

    with replaced(StepTimes, "note", wrap):
        yield


def inside(plan: Path) -> None:
    """Collective over the launch: run the jobs that the file names; rank 0 writes what came of them beside it."""
    told = []
    for words in json.loads(plan.read_text()):
        kept: list[StepTimes] = []
        with noted_times(kept):
            summary = run_batch(resolve(words, {}))
        if not kept:
            continue
        times = kept[0]
        sizes = [1 << power for power in range(1, summary.ranks.bit_length())]
        told.append({
            "bct": summary.seconds - summary.load_seconds, "failed": summary.failed,
            "tokens": summary.generated_tokens, "partitioned": summary.partitioned, "migrated": summary.migrated,
            "lone": times.alone(1), "predicted": {size: times.predicted(size) for size in sizes},
            "measured": {size: times.measured(size) for size in sizes},
        })
    if told:
        plan.with_suffix(".told").write_text(json.dumps(told))


# --- outside ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ran:
    """One run of a variant.  told: what `inside` said; busy: share of the BCT, a rank; begins: when the tail does, as a
    share of the BCT."""

    told: dict[str, Any]
    busy: list[float]
    begins: float

    @property
    def bct(self) -> float:
        """Seconds."""
        return float(self.told["bct"])


def read_lanes(trace: Path, bct: float, ranks: int) -> tuple[list[float], float]:
    """Return each rank's busy share, and the share of the BCT after which some rank stayed without own tokens."""
    busy, last, groups = np.zeros(ranks), np.zeros(ranks), dict[int, range]()
    begun = ended = 0.0
    for one in read_trace(trace):
        begun, ended = begun or one.seconds, one.seconds
        reports = [event for event in one.events if isinstance(event, Reported)]
        computed = {report.rank for report in reports if report.prompt_tokens + report.generated_tokens}
        for report in reports:
            grouped = any(report.rank in members for members in groups.values())
            if report.rank in computed or (report.steps and grouped):
                busy[report.rank] += report.seconds
                if not grouped:
                    last[report.rank] = one.seconds
        for said in one.instructions[0]:
            if isinstance(said, Partition):
                groups.pop(said.sequence, None)
                if said.size > 1:
                    groups[said.sequence] = range(said.first, said.first + said.size)
    return (busy / bct).tolist(), float((last.min() - begun) / max(1e-9, ended - begun))


def tokens_of(path: Path) -> tuple[NDArray[Any], ...]:
    """Return offsets and values of all answers."""
    with h5py.File(path, "r") as file:
        return file["tokens/offsets"][:], file["tokens/values"][:]


def launch(ranks: int, jobs: Sequence[list[str]], folder: Path, limit: float) -> list[dict[str, Any]]:
    """Run jobs one after another on that many ranks of one thread -> what rank 0 told of each."""
    plan = folder / "jobs.json"
    plan.write_text(json.dumps(list(jobs)))
    beside = Path(sys.executable).with_name("mpiexec")
    environ = os.environ | {"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    if ranks > len(os.sched_getaffinity(0)):  # one that waits in MPI must give its core away; else that costs 0.1 ms
        environ["MPIR_CVAR_ENABLE_HEAVY_YIELD"] = "1"
    words = [str(beside if beside.exists() else "mpiexec"), "-n", str(ranks), sys.executable, "-m", "mpi4py", __file__]
    ended = subprocess.run([*words, "--inside", str(plan)], env=environ, capture_output=True, text=True, timeout=limit,
                           check=False)
    if ended.returncode:
        raise SystemExit(f"{ranks} ranks ended with {ended.returncode}:\n{ended.stdout[-1000:]}{ended.stderr[-3000:]}")
    told: list[dict[str, Any]] = json.loads(plan.with_suffix(".told").read_text())
    return told


def measure(work: Work, ranks: int, repeats: int, folder: Path, only: Sequence[str]) -> dict[str, list[Ran]]:
    """Run all variants of a work, taking turns -> runs of each."""
    model, _ = make_work(work)
    requests = request_file(work, folder)
    forced = ("--drill", "partition=2")
    variants = {name: words for name, words in (VARIANTS | {FORCED: forced}).items() if name in only}
    jobs, names = [], []
    for repeat in range(repeats):
        for name, words in variants.items():
            if name == FORCED and repeat:
                continue
            stem = folder / f"run-{len(jobs)}"
            names.append((name, stem))
            jobs.append([
                "--model", str(model), "--input-file", str(requests), "--output-file", f"{stem}.h5", "--overwrite",
                "--progress", "off", "--log-level", "warning", "--threads", "1", "--trace", f"{stem}.trace",
                "--host-kv-memory", "1G", *words,
            ])
    warm = [*jobs[0]]
    told = launch(ranks, [warm, *jobs], folder, 1800)[1:]
    first = tokens_of(Path(f"{names[0][1]}.h5"))
    runs: dict[str, list[Ran]] = {}
    for (name, stem), one in zip(names, told, strict=True):
        if one["failed"] or not all(map(np.array_equal, first, tokens_of(Path(f"{stem}.h5")))):
            raise SystemExit(f"{work.name}, {name}: {one['failed']} rows failed, or the tokens differ")
        busy, begins = read_lanes(Path(f"{stem}.trace"), one["bct"], ranks)
        runs.setdefault(name, []).append(Ran(one, busy, begins))
    return runs


def show(work: Work, ranks: int, runs: dict[str, list[Ran]], figures: dict[str, Any]) -> None:
    """Print the table of one work and note its figures."""
    cores = len(os.sched_getaffinity(0))
    lengths = work.lengths
    print(f"\n{work.name}, {ranks} ranks x 1 thread on {cores} cores: {lengths.requests} requests, "
          f"{int(lengths.answers().sum())} answer tokens, the longest {int(lengths.answers().max())}\n"
          f"{'variant':>17} {'BCT s':>8} {'/ ' + BASELINE:>16} {'tail from':>10} {'groups':>7} {'moved':>6}  "
          "busy a rank")
    best = {name: min(ran, key=lambda one: one.bct) for name, ran in runs.items()}
    key = f"{work.name.replace(', ', '_').replace(' ', '_')}_{ranks}_ranks"
    for name, one in best.items():
        ratio = one.bct / best[BASELINE].bct
        busy = " ".join(f"{share:4.0%}" for share in one.busy)
        print(f"{name:>17} {one.bct:>8.2f} {ratio:>16.2f} {one.begins:>10.0%} {one.told['partitioned']:>7} "
              f"{one.told['migrated']:>6}  {busy}")
        figures[f"{key}_bct_ratio_{name.replace(' ', '_')}"] = ratio
    figures[f"{key}_bct_s_{BASELINE.replace(' ', '_')}"] = best[BASELINE].bct
    figures[f"{key}_partitions"] = best["everything on"].told["partitioned"]
    figures[f"{key}_tail_from"] = best[BASELINE].begins
    for name in ("everything on", FORCED):
        if name in best:
            show_steps(name, best[name].told, key, figures)


def show_steps(name: str, told: dict[str, Any], key: str, figures: dict[str, Any]) -> None:
    """Print what a step took alone and over groups, and what had been predicted."""
    for size, measured in told["measured"].items():
        predicted = told["predicted"][size]
        if predicted is None:
            continue
        line = f"{name}: a step alone {1e3 * told['lone']:.2f} ms, over {size} ranks predicted {1e3 * predicted:.2f} ms"
        if measured is not None:
            line += f", measured {1e3 * measured:.2f} ms, predicted / measured {predicted / measured:.2f}"
            figures[f"{key}_{name.replace(' ', '_')}_predicted_over_measured_{size}"] = predicted / measured
        print(line)


def main() -> None:
    """Run the jobs on two and on four ranks; print the tables and the JSON line."""
    parser = argparse.ArgumentParser(description="What do PARTITION and MIGRATE bring in the tail of a job?")
    parser.add_argument("--quick", action="store_true", help="a small model, the straggler alone, one turn")
    parser.add_argument("--repeats", type=int, default=2, help="turns of every variant")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--works", nargs="+", default=[""], help="only works whose name holds one of these")
    parser.add_argument("--variants", nargs="+", default=[*VARIANTS, FORCED])
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inside:
        inside(asked.inside)
        return
    figures: dict[str, Any] = {}
    for work in works(asked.quick):
        if not any(word in work.name for word in asked.works):
            continue
        for ranks in asked.ranks:
            with tempfile.TemporaryDirectory(prefix="bgmpi-tail-") as folder:
                few = asked.quick and ranks > min(asked.ranks)
                only = [name for name in asked.variants if not few or name in ("everything on", BASELINE, FORCED)]
                runs = measure(work, ranks, 1 if asked.quick else asked.repeats, Path(folder), only)
                show(work, ranks, runs, figures)
    print_line("tail", figures, quick=asked.quick)


if __name__ == "__main__":
    main()
