"""Runs `bgmpi` and signals a rank at one exact instant: python signal_at.py RANK SIGNAL SITE COUNT run --model ...

As kill_at, but the process lives on: RANK (a number, or all) sends itself SIGNAL (TERM, USR1) before the COUNT-th call
of SITE and before every later one, so a second signal always comes while the first is being obeyed.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any


def arm(site: str, number: signal.Signals, count: int) -> None:
    """Let this process send itself `number` from the `count`-th call of `site` on."""
    module, _, path = site.partition(":")
    owner: Any = importlib.import_module(module)
    *classes, name = path.split(".")
    for one in classes:
        owner = getattr(owner, one)
    function, calls = getattr(owner, name), 0

    @functools.wraps(function)
    def signalled(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= count:
            os.kill(os.getpid(), number)
        return function(*arguments, **options)

    setattr(owner, name, signalled)


def signal_words(rank: int | str, number: str, site: str, count: int = 1) -> tuple[str | Path, ...]:
    """Return the words before `run ...` that signal a rank there."""
    return sys.executable, Path(__file__), str(rank), number, site, str(count)


def main() -> None:
    """Arm, then run the program."""
    rank, number, site, count = sys.argv[1:5]
    if rank in ("all", os.environ.get("PMI_RANK", os.environ.get("SLURM_PROCID", "0"))):
        arm(site, signal.Signals[f"SIG{number}"], int(count))
    from bgmpi.cli import main as program

    sys.exit(program(sys.argv[5:]))


if __name__ == "__main__":
    main()
