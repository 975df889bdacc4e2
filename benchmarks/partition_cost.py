"""Answers: how long after rank 0's decision a group draws its first token (PARTITION).

Physics: views of weights that every rank holds, one message with the sequence's position, its KV copied to each member
(2,000 tokens of Work A are 25 MB, within a node a copy in memory), and one step.  Nothing is loaded and no communicator
is made, hence milliseconds where the paper's table has 5 to 10 s for a reconfiguration (A9).  The baseline is a step of
the lone sequence in the same job: less than that, a first token cannot take.

Two sequences of Work A's model on two ranks of one core each; one ends at once, then groups of both ranks are flipped
on and off in every round by the drill.  Read from the job's trace: from rank 0's clock when it decided to the end of
the leader's next step.  The first time counts, in which shards are made; the least of some jobs, because a shared
machine only adds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from line import Limit, print_line
from tail import launch
from work import FIRST_TOKEN, WORK_A, make_work

from bgmpi.primitives import Partition
from bgmpi.trace import read_deeds, read_trace

PROMPT, ANSWER, LIMIT_MS = 1800, 240, 50.0


def partition_time(*, quick: bool = False) -> tuple[dict[str, float], list[Limit]]:
    """Run the jobs -> figures in milliseconds, and the limit."""
    model, _ = make_work(WORK_A)
    with tempfile.TemporaryDirectory(prefix="bgmpi-partition-") as scratch:
        folder = Path(scratch)
        requests = folder / "requests.jsonl"
        prompt = np.random.default_rng(1).integers(FIRST_TOKEN, WORK_A.shape.vocab, PROMPT).tolist()
        # The first row ends at once: in a tail, the ranks that take part have had sequences in their pages before.
        bodies = [
            {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True} for tokens in (2, ANSWER)
        ]
        lines = [
            json.dumps({"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body})
            for i, body in enumerate(bodies)
        ]
        requests.write_text("".join(line + "\n" for line in lines))
        traces = [folder / f"{number}.trace" for number in range(2 if quick else 3)]
        jobs = [
            ["--model", str(model), "--input-file", str(requests), "--output-file", str(folder / "out.h5"),
             "--overwrite", "--progress", "off", "--log-level", "warning", "--threads", "1", "--trace", str(trace),
             "--host-kv-memory", "512M", "--drill", "partition=1"]
            for trace in traces
        ]
        told = launch(2, jobs, folder, 300)
        delays = [decision_to_token(trace) for trace in traces]
    first = 1e3 * min(each[0] for each in delays)
    figures = {
        "partition_ms_first": first,
        "partition_ms_again": 1e3 * statistics.median(one for each in delays for one in each[1:]),
        "partition_ms_lone_step": 1e3 * min(one["lone"] for one in told),
        "partition_groups": float(sum(map(len, delays))),
    }
    return figures, [Limit("partition_ms_decision_to_token", first, LIMIT_MS, "<=")]


def decision_to_token(trace: Path) -> list[float]:
    """Return the seconds from every decision for a group to the end of the leader's next step, oldest first."""
    steps: dict[int, list[float]] = {}
    for deed in read_deeds(trace):
        if deed.what == "run":
            steps.setdefault(deed.rank, []).append(deed.time + deed.seconds)
    return [
        min(end for end in steps[said.leader] if end > one.seconds) - one.seconds
        for one in read_trace(trace) for said in one.instructions[0]
        if isinstance(said, Partition) and said.size > 1
    ]


def main() -> None:
    """Print what it takes and the JSON line."""
    parser = argparse.ArgumentParser(description="How long does it take from the decision to a group's first token?")
    parser.add_argument("--quick", action="store_true", help="fewer jobs")
    quick = parser.parse_args().quick
    figures, limits = partition_time(quick=quick)
    first, again, lone = (figures[f"partition_ms_{name}"] for name in ("first", "again", "lone_step"))
    print(f"PARTITION of {PROMPT} to {PROMPT + ANSWER} tokens of Work A over 2 ranks x 1 thread, decision to first "
          f"token: {first:.1f} ms the first time in a job, {again:.1f} ms later; a lone step {lone:.1f} ms; the paper: "
          "5-10 s")
    print_line("partition_cost", figures, limits, quick=quick)


if __name__ == "__main__":
    main()
