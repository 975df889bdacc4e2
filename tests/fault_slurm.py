"""Starts a job of the kill matrix through sbatch and the project's own batch script, and waits for its end.

The script finds a `bgmpi` that arms the kill first (`kill_at`).  Not `sbatch --wait`, which looks once in seconds: how
long a job lives on after a kill is one of the questions.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fault_matrix import Kill
from launch import Ended, launch

SCRIPT = Path(__file__).parents[1] / "slurm" / "run_batch.sh"
_STAND_IN = """#!/bin/sh
exec {python} {program} $KILL_AT "$@"
"""
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT", "OUT_OF_MEMORY", "BOOT_FAIL")
_LIMIT = 180.0


@dataclass(frozen=True, slots=True)
class SlurmStart:
    """A running cluster (its commands' environment), and a folder for the stand-in."""

    cluster: Mapping[str, str]
    folder: Path

    def __call__(self, kill: Kill, words: Sequence[str | Path], environment: Mapping[str, str]) -> Ended:
        """Run the words, which begin with those of `kill_at`, as a job that Slurm does not start again by itself."""
        python, program, *at = (str(word) for word in words)
        cut = at.index("run")
        stand_in = self.folder / "bin" / "bgmpi"
        stand_in.parent.mkdir(parents=True, exist_ok=True)
        if not stand_in.exists():
            stand_in.write_text(_STAND_IN.format(python=python, program=program))
            stand_in.chmod(0o755)
        log = Path(environment["KILL_NOTES"]) / "job.log"
        submit = [
            "sbatch", "--parsable", "--no-requeue", f"--output={log}", f"--nodes={kill.nodes}",
            f"--ntasks={kill.ranks}", SCRIPT, *at[cut + 1 :],
        ]  # fmt: skip
        own = {"RUN_VENV": str(self.folder), "RUN_ON_STOP": "exit", "KILL_AT": " ".join(at[:cut])}
        began = time.monotonic()
        told = launch(submit, env={**own, **self.cluster, **environment}, cwd=log.parent, expect=0).stdout.strip()
        state, code = self._wait(told)
        return Ended(("slurm job", told, state), code, log.read_text() if log.exists() else "", "",
                     time.monotonic() - began)  # fmt: skip

    def _wait(self, number: str) -> tuple[str, int]:
        """Return the state in which a job ended, and its exit code, negative for a signal."""
        deadline = time.monotonic() + _LIMIT
        while time.monotonic() < deadline:
            shown = launch(["scontrol", "show", "job", number], env=self.cluster, expect=0).stdout
            state = re.search(r"JobState=(\w+)", shown)
            code = re.search(r" ExitCode=(\d+):(\d+)", shown)
            if state and code and state[1] in _ENDED:
                return state[1], int(code[1]) or -int(code[2])
            time.sleep(0.1)
        launch(["scancel", "--signal=KILL", "--full", number], env=self.cluster)
        raise AssertionError(f"job {number} had no end within {_LIMIT:g} s; python {sys.version.split()[0]}")
