"""Runs `bgmpi` and lets a rank get stuck at one instant: python stall_at.py RANK SITE HOW COUNT run --model ...

RANK, SITE and COUNT are those of kill_at.  HOW: sleep (in a call that lets other threads run), hold (in one that holds
the interpreter, so that no other thread runs), stop (the whole process, by SIGSTOP).  None of them ends by itself.
`stall_words` builds the command for tests.  The instant is printed as `stuck at SECONDS` of the system's clock.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


def stand_still(how: str) -> None:
    """Never return."""
    sys.stderr.write(f"stuck at {time.time():.3f}\n")
    sys.stderr.flush()
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        if how == "hold":
            ctypes.PyDLL(None).sleep(3600)
        else:
            time.sleep(3600)


def arm(site: str, how: str, count: int) -> None:
    """Let this process stand still before the `count`-th call of `site`."""
    module, _, path = site.partition(":")
    owner: Any = importlib.import_module(module)
    *classes, name = path.split(".")
    for one in classes:
        owner = getattr(owner, one)
    function, calls = getattr(owner, name), 0

    @functools.wraps(function)
    def stuck(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            stand_still(how)
        return function(*arguments, **options)

    setattr(owner, name, stuck)


def stall_words(rank: int, site: str, how: str = "sleep", count: int = 1) -> list[str | Path]:
    """Return the words before `run ...` that let a rank stand still there."""
    return [sys.executable, Path(__file__), str(rank), site, how, str(count)]


def main() -> None:
    """Arm, then run the program."""
    rank, site, how, count = sys.argv[1:5]
    if rank == os.environ.get("PMI_RANK", os.environ.get("SLURM_PROCID", "0")):
        arm(site, how, int(count))
    from bgmpi.cli import main as program

    sys.exit(program(sys.argv[5:]))


if __name__ == "__main__":
    main()
