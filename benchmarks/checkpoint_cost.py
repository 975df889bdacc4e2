"""Answers what share of a job's time its checkpoints cost.

Physics: a checkpoint writes the answers that finished since the last one (they must be written once in any case) and,
of every live sequence, the tokens that it has: a thousand sequences of a thousand tokens are 4 MB, one file, a few
fsyncs.  That is some hundredths of a second every minute.

One real job, its checkpoints every 2 s and none at all in turns, so that both kinds of runs see the same neighbours.
The seconds inside a checkpoint's calls are summed, apart for segments (which grow with the answers, not with the number
of checkpoints) and for the progress of unfinished answers (which every checkpoint pays anew).  At the default interval
a job pays the first once and the second every 60 s:

    share = seconds of segments / seconds of the job + seconds of one progress / 60

The ratio of the two kinds of runs is told beside it; it holds thirty times as many checkpoints as by default.  And what
one progress takes for a rank with a thousand live sequences of a thousand tokens, by the real writer, with and without
log-probabilities.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from line import Limit, print_line
from watch import replaced
from work import SMALL, WORK_A, make_work, run_job

from bgmpi.config import Config
from bgmpi.engine import _Checkpoint
from bgmpi.io.segments import SegmentWriter
from bgmpi.rank import Rank
from bgmpi.request import Answer, Finish, Logprobs

LIMIT_SHARE, SHORT, NEVER = 0.02, 2.0, 1e6
SEQUENCES, TOKENS, WIDTH = 1000, 1000, 5


def run(model: Path, requests: Path, output: Path, interval: float) -> dict[str, float]:
    """Run the job -> its seconds, and those inside checkpoints by part, with how many there were."""
    seen: dict[str, float] = defaultdict(float)

    def timed(part: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
            def timed_call(*arguments: Any, **options: Any) -> Any:
                begun = time.perf_counter()
                result = call(*arguments, **options)
                seen[part] += time.perf_counter() - begun
                seen[f"{part}_calls"] += 1
                return result

            return timed_call

        return wrap

    parts = {
        "save": (_Checkpoint, "save"), "flush": (SegmentWriter, "flush"), "gather": (Rank, "unfinished"),
        "progress": (SegmentWriter, "save_progress"),
    }  # fmt: skip
    with ExitStack() as stack:
        for part, (owner, name) in parts.items():
            stack.enter_context(replaced(owner, name, timed(part)))
        summary = run_job(model, requests, output, 1, "--checkpoint-interval", str(interval))
    return {"job": summary.seconds - summary.load_seconds, **seen}


def one_progress(folder: Path, width: int | None, tries: int) -> float:
    """Return the least seconds of writing how far a thousand sequences of a thousand tokens are."""
    draw, seconds = np.random.default_rng(1), []
    tokens = draw.integers(3, 32000, (SEQUENCES, TOKENS)).astype(np.int32)
    answers = []
    for row in range(SEQUENCES):
        logprobs = None
        if width is not None:
            top = draw.random((TOKENS, width)).astype(np.float32)
            logprobs = Logprobs(top[:, 0].copy(), np.repeat(tokens[row, :, None], width, 1), top)
        answers.append(Answer(row, 0, f"r{row}", Finish.UNFINISHED, 100, tokens[row], "", logprobs=logprobs,
                              url="/v1/completions", queued_s=0.0, first_token_s=1.0))  # fmt: skip
    with SegmentWriter(folder, 0) as writer:
        for _ in range(tries):
            begun = time.perf_counter()
            writer.save_progress(answers)
            seconds.append(time.perf_counter() - begun)
    return min(seconds)


def main() -> None:
    """Print the parts, the limit and the JSON line."""
    parser = argparse.ArgumentParser(description="What share of a job's time do its checkpoints cost?")
    parser.add_argument("--quick", action="store_true", help="a smaller job, one turn")
    quick = parser.parse_args().quick
    default = Config().checkpoint_interval
    model, requests = make_work(SMALL if quick else WORK_A)
    with tempfile.TemporaryDirectory(prefix="bgmpi-checkpoint-") as scratch:
        output = Path(scratch) / "out.h5"
        run(model, requests, output, NEVER)  # compiles, and reads the weights into the page cache
        turns = [(run(model, requests, output, SHORT), run(model, requests, output, NEVER))
                 for _ in range(1 if quick else 3)]  # fmt: skip
        large = {width: one_progress(Path(scratch) / f"width-{width}", width, 5) for width in (None, WIDTH)}
    saving = [one for one, _ in turns]
    saves = sum(one["save_calls"] for one in saving)
    seconds = sum(one["job"] for one in saving)
    segments = sum(one["flush"] for one in saving)
    progress = sum(one["gather"] + one["progress"] for one in saving) / saves
    share = segments / seconds + progress / default
    ratio = statistics.median(one["job"] / never["job"] for one, never in turns)
    print(f"{len(turns)} jobs of {seconds / len(turns):.1f} s with a checkpoint every {SHORT:g} s, in turns with as "
          f"many without: {ratio:.3f} times as long; {saves / len(turns):.1f} checkpoints a job")
    print(f"{'progress of unfinished answers':40}{progress * 1e3:8.1f} ms a checkpoint")
    print(f"{'segments of finished answers':40}{segments / seconds:8.3%} of the job")
    print(f"{f'share at the default interval, {default:g} s':40}{share:8.3%} of the job")
    for width, took in large.items():
        asked = "" if width is None else f", {width} log-probabilities each"
        print(f"progress of {SEQUENCES} sequences of {TOKENS} tokens{asked}: {took * 1e3:.0f} ms, {took / default:.3%} "
              f"of {default:g} s")
    figures = {
        "job_seconds": seconds / len(turns), "ratio_at_2_s": ratio, "checkpoints_a_job": saves / len(turns),
        "progress_ms": progress * 1e3, "share_of_segments": segments / seconds,
        "progress_ms_1000_x_1000": large[None] * 1e3, "progress_ms_1000_x_1000_logprobs": large[WIDTH] * 1e3,
    }  # fmt: skip
    limits = [
        Limit("share_of_bct_at_the_default_interval", share, LIMIT_SHARE, "<="),
        Limit("share_of_60_s_for_1000_x_1000_tokens_with_logprobs", large[WIDTH] / default, LIMIT_SHARE, "<="),
    ]
    print_line("checkpoint_cost", figures, limits, quick=quick)


if __name__ == "__main__":
    main()
