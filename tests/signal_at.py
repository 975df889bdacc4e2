"""Runs `bgmpi` and does something to it at one exact instant: python signal_at.py RANK DEED SITE COUNT run --model ...

As kill_at, but the process lives on.  RANK: a number, or all.  DEED: a signal (TERM, USR1, KILL), which the rank sends
itself before the COUNT-th call of SITE and before every later one, so a second signal always comes while the first is
being obeyed; or a shell command, which runs once, every later call being slowed down so that it takes effect in time.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_PAUSE = 0.3


def arm(site: str, deed: str, count: int) -> None:
    """Let this process do the deed from the `count`-th call of `site` on."""
    module, _, path = site.partition(":")
    owner: Any = importlib.import_module(module)
    *classes, name = path.split(".")
    for one in classes:
        owner = getattr(owner, one)
    function, calls = getattr(owner, name), 0

    @functools.wraps(function)
    def disturbed(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= count and deed in ("TERM", "USR1", "KILL"):
            os.kill(os.getpid(), signal.Signals[f"SIG{deed}"])
        elif calls == count:
            subprocess.run(deed, shell=True, check=True)
        elif calls > count:
            time.sleep(_PAUSE)
        return function(*arguments, **options)

    setattr(owner, name, disturbed)


def signal_words(rank: int | str, deed: str, site: str, count: int = 1) -> tuple[str | Path, ...]:
    """Return the words before `run ...` that do that to a rank there."""
    return sys.executable, Path(__file__), str(rank), deed, site, str(count)


def main() -> None:
    """Arm, then run the program."""
    rank, deed, site, count = sys.argv[1:5]
    first = os.environ.get("SLURM_RESTART_COUNT", "0") == "0"  # a requeued job is left alone
    if first and rank in ("all", os.environ.get("PMI_RANK", os.environ.get("SLURM_PROCID", "0"))):
        arm(site, deed, int(count))
    from bgmpi.cli import main as program

    sys.argv = ["bgmpi", *sys.argv[5:]]
    sys.exit(program())


if __name__ == "__main__":
    main()
