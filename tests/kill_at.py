"""Runs `bgmpi` and kills a rank at one exact instant: python kill_at.py RANK SITE WHEN COUNT run --model ...

RANK: a number, or all.  SITE: module:function or module:Class.method.  WHEN: before or after its COUNT-th call.  The
kill is SIGKILL, so nothing is flushed, closed or told.  `kill_words` builds the command for tests.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any


def arm(site: str, when: str, count: int) -> None:
    """Let this process die before or after the `count`-th call of `site`."""
    module, _, path = site.partition(":")
    owner: Any = importlib.import_module(module)
    *classes, name = path.split(".")
    for one in classes:
        owner = getattr(owner, one)
    function, calls = getattr(owner, name), 0

    @functools.wraps(function)
    def deadly(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*arguments, **options)
        if calls == count and when == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, deadly)


def kill_words(rank: int | str, site: str, when: str = "before", count: int = 1) -> list[str | Path]:
    """Return the words before `run ...` that kill a rank there."""
    return [sys.executable, Path(__file__), str(rank), site, when, str(count)]


def main() -> None:
    """Arm, then run the program."""
    rank, site, when, count = sys.argv[1:5]
    if rank in ("all", os.environ.get("PMI_RANK", os.environ.get("SLURM_PROCID", "0"))):
        arm(site, when, int(count))
    from bgmpi.cli import main as program

    sys.exit(program(sys.argv[5:]))


if __name__ == "__main__":
    main()
