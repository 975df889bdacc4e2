"""Answers: how long and how much memory rank 0 needs until the sharing of a million prompts is planned.

Physics: every token is looked at once, to be hashed: 4 GB, a handful of passes in the cache, some nanoseconds a token.
Then only hashes are compared, 16 a prompt, and of each prompt at most two pages are read again.  An object for each
node, or the tokens themselves, would not fit the limits; 8 bytes a page and some arrays of a few numbers a prompt do.

Three jobs, each in a process of its own, since its peak is what is measured: groups of 16 that share 900 tokens, in
shuffled order; prompts that share nothing, all of which fall apart at their first page; and one head of 500 tokens
before all, which does not end at a page's border.  Tokens lie in a file and are read through it, for `add` in the order
of the prompts and for `build` page by page, so they are no memory of the process.  Tokenising is not part of it.  Peak
is resident memory of the whole process, with torch, which is loaded anyway.  The baseline is to read the tokens and add
them up.

Seconds of a job are add, build and the multi-level plan; with --quick they are those of 50,000 prompts times 20.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from line import Limit, print_line
from numpy.typing import NDArray

from bgmpi.prefix_tree import PrefixTreeBuilder
from bgmpi.share_plan import share_plan

TOKENS, PAGE, VOCABULARY = 1000, 64, 150_000
MILLION, QUICK = 1_000_000, 50_000
PIECE = 2000  # prompts that are made, written or read at once
LIMIT_SECONDS, LIMIT_BYTES = 120.0, 4 << 30


@dataclass(frozen=True, slots=True)
class Workload:
    """So many prompts begin with one of the heads: members of each head, tokens of a head."""

    members: int
    head: int


WORKLOADS = {"groups": Workload(16, 900), "nothing shared": Workload(1, 0), "one head": Workload(MILLION, 500)}


def write_tokens(work: Workload, prompts: int, path: Path) -> None:
    """Write int32 [prompts, TOKENS], the members of a head scattered over the file."""
    draw = np.random.default_rng(4)
    heads = draw.integers(0, VOCABULARY, (-(-prompts // work.members), work.head), np.int32)
    head = draw.permutation(prompts) // work.members
    with path.open("wb") as file:
        for first in range(0, prompts, PIECE):
            mine = head[first : first + PIECE]
            tail = draw.integers(0, VOCABULARY, (len(mine), TOKENS - work.head), np.int32)
            file.write(np.concatenate([heads[mine], tail], axis=1).tobytes())


# --- the measured process ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class TokenFile:
    """The prompts in a file.  pages: how many the tree asked for."""

    descriptor: int
    prompts: int
    pages: int = 0

    def pieces(self) -> Iterator[tuple[int, NDArray[np.int32]]]:
        """Yield the first prompt and the tokens [k, TOKENS] of one piece after another."""
        for first in range(0, self.prompts, PIECE):
            count = min(PIECE, self.prompts - first) * TOKENS
            read = os.pread(self.descriptor, 4 * count, 4 * first * TOKENS)
            yield first, np.frombuffer(read, np.int32).reshape(-1, TOKENS)

    def read(self, prompts: NDArray[np.int64], ordinal: int) -> NDArray[np.int32]:
        """Be the reader of pages; the last token of a prompt is not shareable."""
        self.pages += len(prompts)
        pages = np.full((len(prompts), PAGE), -1, np.int32)
        size = min(PAGE, TOKENS - 1 - ordinal * PAGE)
        begin = ordinal * PAGE
        for page, prompt in zip(pages, prompts.tolist(), strict=True):
            os.preadv(self.descriptor, [page[:size]], 4 * (prompt * TOKENS + begin))
        return pages


def inside(path: Path, prompts: int) -> None:
    """Make the tree and both plans; print what each took."""
    with path.open("rb") as file:
        tokens = TokenFile(file.fileno(), prompts)
        times = [time.perf_counter()]
        total = sum(int(piece.sum()) for _, piece in tokens.pieces())
        times.append(time.perf_counter())
        before = resident("VmRSS")
        builder = PrefixTreeBuilder(prompts, PAGE)
        for first, piece in tokens.pieces():
            names = np.arange(first, first + len(piece))
            builder.add(names, np.full(len(piece), TOKENS - 1), piece[:, :-1].ravel())
        times.append(time.perf_counter())
        weight, length = np.ones(prompts, np.int32), np.full(prompts, TOKENS)
        tree = builder.build(weight, tokens.read)
        times.append(time.perf_counter())
        plan = share_plan(tree, weight, length, mode="multi-level")
        times.append(time.perf_counter())
        peak = resident("VmHWM")
        one_level = share_plan(tree, weight, length, mode="one-level")
        times.append(time.perf_counter())
    seconds = dict(zip(("read", "add", "build", "plan", "one_level"), np.diff(times).tolist(), strict=True))
    saved, saved_one = (1 - one.computed / one.logical for one in (plan, one_level))
    told = {"peak": peak, "before": before, "pages": tokens.pages, "nodes": len(tree.depth), "total": total,
            "saved": saved, "saved_one": saved_one}  # fmt: skip
    print(json.dumps(seconds | told))


def resident(field: str) -> int:
    """Return bytes of this process in memory: now (VmRSS) or at the most (VmHWM)."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def measured(work: Workload, prompts: int, folder: Path) -> dict[str, float]:
    """Write the tokens, run the process, and return what it told."""
    path = folder / "tokens"
    write_tokens(work, prompts, path)
    told = subprocess.run([sys.executable, __file__, "--inside", str(path), str(prompts)], capture_output=True,
                          text=True, timeout=580, check=False)  # fmt: skip
    path.unlink()
    if told.returncode:
        raise RuntimeError(f"the measured process ended with {told.returncode}:\n{told.stderr}")
    figures: dict[str, float] = json.loads(told.stdout.splitlines()[-1])
    return figures


def main() -> None:
    """Print seconds and memory by job, the limits and the JSON line."""
    parser = argparse.ArgumentParser(description="What does it take to plan the sharing of a million prompts?")
    parser.add_argument("--quick", action="store_true", help="50,000 prompts")
    parser.add_argument("--inside", nargs=2, metavar=("TOKENS", "PROMPTS"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inside:
        inside(Path(asked.inside[0]), int(asked.inside[1]))
        return
    prompts = QUICK if asked.quick else MILLION
    with tempfile.TemporaryDirectory(prefix="bgmpi-tree-") as folder:
        told = {name: measured(work, prompts, Path(folder)) for name, work in WORKLOADS.items()}
    print(f"{prompts} prompts of {TOKENS} tokens; seconds to read them, to add, build, plan, plan one level;")
    print("peak and start, MB; pages read again a prompt; nodes; saved prefill, %, multi-level and one-level:")
    for name, one in told.items():
        seconds = "".join(f"{one[part]:8.2f}" for part in ("read", "add", "build", "plan", "one_level"))
        print(f"{name:16}{seconds}{one['peak'] / 1e6:8.0f}{one['before'] / 1e6:6.0f}{one['pages'] / prompts:6.2f}"
              f"{one['nodes']:9.0f}{100 * one['saved']:7.2f}{100 * one['saved_one']:7.2f}")  # fmt: skip
    scale = MILLION / prompts
    seconds_of = {name: scale * (one["add"] + one["build"] + one["plan"]) for name, one in told.items()}
    figures = {f"{part}_{name.replace(' ', '_')}": value for name, one in told.items() for part, value in one.items()}
    limits = [
        Limit("seconds_a_million_prompts", max(seconds_of.values()), LIMIT_SECONDS, "<="),
        Limit("peak_bytes", max(one["peak"] for one in told.values()), LIMIT_BYTES, "<="),
    ]
    print_line("prefix_tree", figures, limits, quick=asked.quick)


if __name__ == "__main__":
    main()
