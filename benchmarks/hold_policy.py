"""Answers: who should yield when pages run short, the longest decoded (the paper) or the shortest (its released code).

Physics: the longest frees most pages at once and so yields seldom, but its bytes (or, where there is no place to keep
KV, its tokens) are the dearest to bring back, and it is late already; the shortest is cheap to bring back, but its
pages are soon needed again.  Which effect wins depends on the lengths, on where the KV goes, and on how fast the link
is; nobody has published the comparison (paper A5).

A simulation: the rank's real SequenceManager decides, page boundary by page boundary as `Rank.run` asks it, and a clock
of the model counts.  No tensors, so neither the machine nor its load matters and the figures are exact.  The model of a
step: FIXED (weights are read) + PER_TOKEN for each token computed, tokens computed again included; pages copied at a
YIELD or COMBINE go over the link alone; KV that is streamed for a step goes over it behind the compute, so the slower
of the two counts.  Lengths: all alike, the heavy tail of work.py, or two kinds; an answer's length is unknown to the
policy, only the cap is.  Pools hold about a third or a half of what all slots would like.  Means are over several
orders of the requests, because one order says little: it decides when the longest answers begin.

Three ways of being short: `held` (device pool, the yielded wait at home), `streamed` (they go on from home, through the
link), `given up` (no other place: KV is thrown away and computed again).  The baseline is the same job with pages
enough: BCT is told as a multiple of its.  The ratio longest / shortest of two BCTs is what decides.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, geometric_mean

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from line import print_line
from numpy.typing import NDArray
from work import Lengths

from bgmpi.backlog import Entry
from bgmpi.eviction import Eviction, Hold, Way
from bgmpi.kv_places import KvPlaces
from bgmpi.sequence_manager import SequenceManager

FIXED, PER_TOKEN = 10e-3, 50e-6  # seconds
KV_BYTES = 128 * 1024  # a token: 32 layers, 8 KV heads of 128, bfloat16
LINKS = {"20 GB/s": 20e9, "2 GB/s": 2e9}
PAGE, SLOTS, BUDGET, ENOUGH = 64, 64, 1024, 16384
POOLS = (128, 192)  # pages
WAYS = ("held", "streamed", "given up")
EVEN = 0.01  # a difference of BCT below this share decides nothing


@dataclass(frozen=True, slots=True)
class Job:
    """Lengths in tokens, int64 [requests] each; cap: what the policy knows of the answers."""

    prompts: NDArray[np.int64]
    answers: NDArray[np.int64]
    cap: int


@dataclass(slots=True)
class Outcome:
    """What one run came to.  bct, mean_sct: model seconds by link; yields: sequences that had to make room."""

    bct: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LINKS, 0.0))
    mean_sct: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LINKS, 0.0))
    steps: int = 0
    yields: int = 0
    copied: int = 0
    streamed: int = 0
    wasted: int = 0

    def copy(self, pages: int) -> None:
        """Count pages that go over the link while nothing is computed."""
        size = pages * PAGE * KV_BYTES
        self.copied += size
        for link, speed in LINKS.items():
            self.bct[link] += size / speed

    def step(self, tokens: int, pages: int) -> None:
        """Count one step, streaming `pages` behind it."""
        size = pages * PAGE * KV_BYTES
        self.steps += 1
        self.streamed += size
        for link, speed in LINKS.items():
            self.bct[link] += max(FIXED + tokens * PER_TOKEN, size / speed)


def jobs(requests: int, seed: int) -> dict[str, Job]:
    """Return the three jobs, of about equally many answer tokens; the order of requests is drawn by `seed`."""
    draw = np.random.default_rng(seed)
    tail = Lengths(requests, shortest=32, longest=128, median=192, p95=768, seed=seed)
    total = int(tail.answers().sum())
    alike = draw.permutation(np.linspace(0.9, 1.1, requests) * total / requests).astype(np.int64)
    kinds = np.where(np.arange(requests) % 5 == 0, 10, 1) * total / (requests * 2.8)
    answers = {"alike": alike, "heavy tail": tail.answers(), "two kinds": draw.permutation(kinds).astype(np.int64)}
    return {name: Job(tail.prompts(), one, int(one.max())) for name, one in answers.items()}


def run(job: Job, way: str, hold: Hold, pool: int) -> Outcome:
    """Run a job to its end as a rank of `pool` pages does."""
    device = None if way == "given up" else pool
    home = pool if device is None else ENOUGH
    places = KvPlaces(slots=SLOTS, page_tokens=PAGE, pages=home, device_pages=device, streamed_most=ENOUGH,
                      stream=way == "streamed")
    most = int(job.prompts.max()) + job.cap
    manager = SequenceManager(places, slots=SLOTS, budget=BUDGET, most_tokens=most, hold=hold)
    manager.admit([Entry(number, np.zeros(size, np.int32), size, size + job.cap)
                   for number, size in enumerate(job.prompts.tolist())])
    outcome, left = Outcome(), len(job.prompts)
    while left:
        while (eviction := manager.evict()) is not None:
            _make_room(manager, eviction, outcome)
        _refill(manager, outcome)
        for _ in range(PAGE):
            ended = _step(manager, job, outcome)
            if ended:
                left -= ended
                for link, now in outcome.bct.items():
                    outcome.mean_sct[link] += ended * now / len(job.prompts)
                _refill(manager, outcome)
    manager.check()
    outcome.wasted = manager.tokens.wasted
    return outcome


def _make_room(manager: SequenceManager, eviction: Eviction, outcome: Outcome) -> None:
    places, slots = manager.places, eviction.slots
    outcome.yields += len(slots)
    if eviction.way is Way.DEMOTE:
        outcome.copy(int((-(-manager.active_set.with_kv[slots] // PAGE) - places.stored[slots] // PAGE).sum()))
        places.stored[slots] = manager.active_set.with_kv[slots]
    manager.evicted(eviction)


def _refill(manager: SequenceManager, outcome: Outcome) -> None:
    manager.refill()
    ready = manager.promote()
    outcome.copy(int((-(-manager.active_set.with_kv[ready] // PAGE)).sum()))
    manager.promoted(ready)


def _step(manager: SequenceManager, job: Job, outcome: Outcome) -> int:
    """Make one step; -> how many sequences ended by it."""
    plan = manager.plan()
    if plan is None:
        return 0
    through = plan.slots[plan.resident :]
    decoding = through[np.diff(plan.first)[plan.resident :] == 1]
    outcome.step(len(plan.ids), int((-(-manager.active_set.with_kv[decoding] // PAGE)).sum()))
    drawn = plan.slots[plan.emits]
    decoded = manager.active_set.decoded(drawn) + 1
    stopped = decoded >= job.answers[manager.active_set.sequence[drawn]]
    ended = manager.commit(plan, np.zeros(len(drawn), np.int32), stopped, np.zeros(len(drawn), bool))
    manager.retire(ended)
    return len(ended.slots)


def main() -> None:
    """Run every way, lengths and policy; print the table and what it recommends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer requests, one order of them")
    quick = parser.parse_args().quick
    requests, seeds, pools = (192, range(1), POOLS[:1]) if quick else (512, range(3), POOLS)
    print(f"{requests} requests in {len(seeds)} orders, {SLOTS} slots, pages of {PAGE} tokens; BCT as a multiple of "
          "that with pages enough, SCT the mean of completion times\n")
    print(f"{'KV is':<9} {'lengths':<10} {'pool':>4}  {'who yields':<16} {'yields':>7} {'GB copied':>9} "
          f"{'GB streamed':>11} {'wasted tok':>10}" + "".join(f"  {'BCT, SCT at ' + link:>22}" for link in LINKS))
    ratios: dict[str, list[float]] = {}
    for way in WAYS:
        for name in jobs(requests, 0):
            work = [jobs(requests, seed)[name] for seed in seeds]
            ideal = [run(job, way, Hold.LONGEST, ENOUGH) for job in work]
            for pool in pools:
                for link, values in _compare(way, name, pool, work, ideal).items():
                    ratios[f"{way}, {name}, {pool} pages{link}"] = values
    _conclude(ratios, quick)


def _compare(way: str, name: str, pool: int, work: list[Job], ideal: list[Outcome]) -> dict[str, list[float]]:
    """Print both policies' lines; -> BCT longest / shortest by link, one for each order of requests."""
    outcomes = {hold: [run(job, way, hold, pool) for job in work] for hold in Hold}
    for hold, several in outcomes.items():
        shown = ""
        for link in LINKS:
            bct = fmean(one.bct[link] / best.bct[link] for one, best in zip(several, ideal, strict=True))
            shown += f"  {bct:13.3f}x {fmean(one.mean_sct[link] for one in several):5.1f} s"
        copied, streamed = fmean(one.copied for one in several), fmean(one.streamed for one in several)
        print(f"{way:<9} {name:<10} {pool:>4}  {hold.value:<16} {fmean(one.yields for one in several):7.0f} "
              f"{copied / 1e9:9.1f} {streamed / 1e9:11.1f} {fmean(one.wasted for one in several):10.0f}{shown}",
              flush=True)
    pairs = list(zip(outcomes[Hold.LONGEST], outcomes[Hold.SHORTEST], strict=True))
    if way == "given up":  # nothing goes over a link
        first = next(iter(LINKS))
        return {"": [a.bct[first] / b.bct[first] for a, b in pairs]}
    return {f", {link}": [a.bct[link] / b.bct[link] for a, b in pairs] for link in LINKS}


def _conclude(ratios: dict[str, list[float]], quick: bool) -> None:
    print("\nBCT longest-decoded / shortest-decoded (below 1: longest wins), mean and range over orders")
    for key, values in ratios.items():
        print(f"  {key:<42} {geometric_mean(values):.3f}  ({min(values):.3f} to {max(values):.3f})")
    means = [geometric_mean(values) for values in ratios.values()]
    overall = geometric_mean(means)
    longest, shortest = sum(one < 1 - EVEN for one in means), sum(one > 1 + EVEN for one in means)
    chosen = Hold.LONGEST if overall < 1 else Hold.SHORTEST
    even = len(means) - longest - shortest
    print(f"\nlongest-decoded is better in {longest} cells, shortest-decoded in {shortest}, {even} are even within "
          f"{EVEN:.0%}; over all {overall:.3f}: recommended is {chosen.value}")
    figures = {f"bct_ratio {key}": geometric_mean(values) for key, values in ratios.items()}
    print_line("hold_policy", {**figures, "bct_ratio_all": overall, "cells_longest": longest,
                               "cells_shortest": shortest, "recommended": chosen.value}, quick=quick)


if __name__ == "__main__":
    main()
