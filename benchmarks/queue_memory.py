"""Answers how much memory rank 0 needs for a job of a million rows.

Physics: the index keeps 56 bytes a row, the scheduler's tables some 60 bytes a sequence, collecting finished answers
some 50 bytes each; the rows themselves stay in the input file.  A million rows are then a quarter of a gigabyte; an
object of Python for each row would be more than the whole limit.

The real program runs on one rank with a tiny model, watched by a thread that looks at its own memory a hundred times a
second (anonymous pages: what it allocated; pages of mapped files are the page cache's).  Measured: the start and the
first rounds of a job of a million queued rows, and the going on of a job of which all but 100 rows are finished, up to
its published file.  The baseline is the same with a thousand rows.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from line import Limit, print_line
from resume_time import TINY, UNFINISHED, finish, words, work
from work import Lengths, make_work, write_requests

LIMIT_BYTES, ROUNDS, FEW = 1 << 30, 20, 1000


def requests_of(rows: int, folder: Path) -> Path:
    """Write so many requests of short prompts and answers."""
    lengths = Lengths(requests=rows, shortest=8, longest=24, median=8, p95=16, most_ratio=4)
    return write_requests(lengths, TINY.vocab, folder / f"{rows}.jsonl")


# --- the watched program ----------------------------------------------------------------------------------------------


def anonymous_bytes() -> int:
    """Return the bytes of memory that this process has allocated and that are in use now."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def inside(rounds: int, arguments: list[str]) -> None:
    """Run the program, for so many rounds when not 0, and tell the most memory that it had."""
    from bgmpi.cli import main as program
    from bgmpi.head import Head

    most = {"peak": 0}

    def look() -> None:
        while True:
            most["peak"] = max(most["peak"], anonymous_bytes())
            time.sleep(0.01)

    threading.Thread(target=look, daemon=True).start()
    decide, began, decided = Head.decide, time.perf_counter(), 0

    def counted(head: Any, reports: Any) -> Any:
        nonlocal decided
        decided += 1
        if decided == rounds + 1:
            tell()
        return decide(head, reports)

    def tell() -> None:
        seconds = time.perf_counter() - began
        print(json.dumps({"peak": most["peak"], "seconds": seconds}), flush=True)
        os._exit(0)

    if rounds:
        Head.decide = counted  # type: ignore[method-assign]
    program(["run", *arguments])
    tell()


def watch(rounds: int, arguments: list[str]) -> dict[str, float]:
    """Start the program and return its most memory in bytes, and its seconds."""
    told = subprocess.run([sys.executable, __file__, "--inside", str(rounds), *arguments], capture_output=True,
                          text=True, timeout=580, check=False)  # fmt: skip
    if told.returncode:
        raise RuntimeError(f"the program ended with {told.returncode}:\n{told.stderr}")
    figures: dict[str, float] = json.loads(told.stdout.splitlines()[-1])
    return figures


def main() -> None:
    """Print memory by job, the limit and the JSON line."""
    parser = argparse.ArgumentParser(description="How much memory does rank 0 need for a million rows?")
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows, and no published job")
    parser.add_argument("--inside", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inside:
        inside(int(asked.inside[0]), asked.inside[1:])
        return
    rows = 100_000 if asked.quick else 1_000_000
    model, _ = make_work(work(UNFINISHED))
    told: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="bgmpi-queue-") as scratch:
        folder = Path(scratch)
        many, few = requests_of(rows, folder), requests_of(FEW, folder)
        told["queued, a few"] = watch(ROUNDS, words(model, few, folder / "few.h5"))
        told["queued, many"] = watch(ROUNDS, words(model, many, folder / "many.h5"))
        if not asked.quick:
            for name, requests, count in (("few", few, FEW), ("many", many, rows)):
                output = folder / f"end-{name}.h5"
                finish(model, requests, output, count - UNFINISHED)
                told[f"to the end, {name}"] = watch(0, words(model, requests, output))
    base = told["queued, a few"]["peak"]
    print(f"{rows} rows against {FEW}; memory of rank 0, MB (over the small job's), seconds:")
    for name, one in told.items():
        print(f"{name:18}{one['peak'] / 1e6:9.0f} ({(one['peak'] - base) / 1e6:+.0f}) {one['seconds']:8.1f}")
    names = {name: name.replace(", ", "_").replace(" ", "_") for name in told}
    figures = {f"{names[name]}_megabytes": one["peak"] / 1e6 for name, one in told.items()}
    limits = [Limit("bytes_of_rank_0_with_a_million_rows_queued", told["queued, many"]["peak"], LIMIT_BYTES, "<=")]
    print_line("queue_memory", figures, limits, quick=asked.quick)


if __name__ == "__main__":
    main()
