"""Answers: how long after its start a job with 100,000 finished rows draws its first new token.

Physics: the input is read and hashed once (some 25 MB), every segment is hashed once (some 150 MB) and 50 bytes an
answer are looked at; nothing is computed again.  At a gigabyte a second that is a quarter of a second.  What is left is
Python for each row of the input, and the start of Python itself.

The finished rows are written by the program's own writers, as four ranks would have in an hour: a segment a minute
each, journals, a manifest.  Then the real program is started on the whole input, of which 100 rows are unfinished, and
stopped at its first new token.  The baseline, in turns with it: the same program on the 100 rows alone.

The limit is 2 s beside the mapping of weights.  It is set against the seconds from the end of the imports (torch alone
is more than a second, whatever the job) to the first token, without `lay_out`, which maps weights and makes the KV
memory; imports are told beside it.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from line import Limit, print_line
from work import Lengths, ModelShape, Work, make_work

LIMIT_SECONDS, UNFINISHED, RANKS, MINUTES = 2.0, 100, 4, 60
TINY = ModelShape(hidden=64, layers=2, heads=4, kv_heads=2, head=16, experts=4, active=2, inner=64, vocab=512)
#: What is timed: name, module, function.  Each is called once, but the last.
STAGES = (
    ("scan", "bgmpi.prepare", "_scan"),
    ("prepare", "bgmpi.engine", "prepare"),
    ("look", "bgmpi.engine", "look"),
    ("lay_out", "bgmpi.engine", "lay_out"),
    ("begin", "bgmpi.engine", "begin"),
    ("decide", "bgmpi.head", "Head.decide"),
)


def work(rows: int) -> Work:
    """Return a job of so many rows of a tiny model."""
    return Work("tiny", TINY, Lengths(requests=rows, shortest=8, longest=24, median=48, p95=96, most_ratio=4))


def words(model: Path, requests: Path, output: Path) -> list[str]:
    """Return the words of `bgmpi run`."""
    return ["--model", str(model), "--input-file", str(requests), "--output-file", str(output), "--progress", "off",
            "--threads", "1", "--log-level", "warning", "--max-model-len", "1024"]  # fmt: skip


def finish(model: Path, requests: Path, output: Path, rows: int) -> dict[str, float]:
    """Leave what a job leaves that was killed when `rows` rows were finished -> how much that is."""
    from bgmpi.config import resolve
    from bgmpi.io.attempts import begin_attempt
    from bgmpi.io.segments import SegmentWriter, parts_folder
    from bgmpi.prepare import prepare
    from bgmpi.request import Answer, Finish
    from bgmpi.world import open_world

    draw, folder = np.random.default_rng(1), parts_folder(output)
    with open_world(allow_mismatch=True) as world:
        job = prepare(resolve(words(model, requests, output), {}), world)
        assert job.index is not None
        folder.mkdir()
        begin_attempt(folder, 1, job.settings(), job.index.sha256, job.index.content, retry_failed=False)
    pieces = np.array_split(draw.permutation(rows), RANKS)
    for rank, piece in enumerate(pieces):
        with SegmentWriter(folder, rank) as writer:
            for minute in np.array_split(piece, MINUTES):
                for row in minute.tolist():
                    tokens = draw.integers(3, TINY.vocab, int(draw.integers(16, 96))).astype(np.int32)
                    writer.add(Answer(row, 0, f"r{row}", Finish.LENGTH, 16, tokens, "word " * len(tokens),
                                      url="/v1/completions", queued_s=0.0, first_token_s=1.0, done_s=2.0))  # fmt: skip
                writer.flush()
    segments = list(folder.glob("segment-*.h5"))
    return {"segments": float(len(segments)), "segment_megabytes": sum(one.stat().st_size for one in segments) / 1e6,
            "input_megabytes": requests.stat().st_size / 1e6}  # fmt: skip


# --- the watched program ----------------------------------------------------------------------------------------------


def inside(spawned: float, arguments: list[str]) -> None:
    """Run the program until its first token, and tell the seconds of each stage."""
    from bgmpi.cli import main as program
    from bgmpi.sequence_manager import SequenceManager

    for _, module, _ in STAGES:
        importlib.import_module(module)
    told: dict[str, float] = {"imports": time.time() - spawned}

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def noted(*given: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            try:
                return call(*given, **options)
            finally:
                told.setdefault(name, time.perf_counter() - begun)

        return noted

    for name, module, path in STAGES:
        owner: Any = importlib.import_module(module)
        *classes, last = path.split(".")
        for one in classes:
            owner = getattr(owner, one)
        setattr(owner, last, timed(name, getattr(owner, last)))
    commit = SequenceManager.commit

    def first(manager: Any, plan: Any, *more: Any) -> Any:
        if plan.emits.any():
            told["first_token"] = time.time() - spawned
            print(json.dumps(told), flush=True)
            os._exit(0)
        return commit(manager, plan, *more)

    SequenceManager.commit = first  # type: ignore[method-assign]
    program(["run", *arguments])


def watch(arguments: list[str]) -> dict[str, float]:
    """Start the program and return its seconds."""
    told = subprocess.run([sys.executable, __file__, "--inside", str(time.time()), *arguments], capture_output=True,
                          text=True, timeout=120, check=False)  # fmt: skip
    if told.returncode:
        raise RuntimeError(f"the program ended with {told.returncode}:\n{told.stderr}")
    seconds: dict[str, float] = json.loads(told.stdout.splitlines()[-1])
    seconds["counted"] = seconds["first_token"] - seconds["imports"] - seconds["lay_out"]
    return seconds


def main() -> None:
    """Print the stages, the limit and the JSON line."""
    parser = argparse.ArgumentParser(description="How long does a job with 100,000 finished rows take to go on?")
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows, fewer tries")
    parser.add_argument("--inside", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inside:
        inside(float(asked.inside[0]), asked.inside[1:])
        return
    rows, tries = (10_000, 2) if asked.quick else (100_000, 5)
    model, requests = make_work(work(rows + UNFINISHED))
    _, few = make_work(work(UNFINISHED))
    with tempfile.TemporaryDirectory(prefix="bgmpi-resume-") as scratch:
        output = Path(scratch) / "out.h5"
        figures = finish(model, requests, output, rows)
        resumed, fresh = [], []
        for turn in range(tries):
            resumed.append(watch(words(model, requests, output)))
            fresh.append(watch(words(model, few, Path(scratch) / f"few-{turn}.h5")))
    print(f"{rows} finished rows in {figures['segments']:.0f} segments ({figures['segment_megabytes']:.0f} MB), input "
          f"{figures['input_megabytes']:.0f} MB, {UNFINISHED} rows to do; seconds, median (least) of {tries} starts:")
    print(f"{'':14}{'going on':>20}{'100 rows alone':>20}")
    for name in ("imports", *(stage[0] for stage in STAGES), "counted", "first_token"):
        cells = [[one[name] for one in several] for several in (resumed, fresh)]
        print(f"{name:14}" + "".join(f"{statistics.median(cell):>12.3f} ({min(cell):.3f})" for cell in cells))
        figures |= {f"{name}_s": statistics.median(cells[0]), f"{name}_s_fresh": statistics.median(cells[1])}
    counted = figures["counted_s"]
    limit = Limit("seconds_to_first_token_beside_imports_and_weights", counted, LIMIT_SECONDS, "<=")
    print_line("resume_time", figures, [limit], quick=asked.quick)


if __name__ == "__main__":
    main()
