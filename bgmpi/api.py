"""The library door: one call that runs a batch, the same that the command line makes.

It adds nothing to the engine but a name that stays when the engine's rooms change, so notebooks and scripts under
mpiexec need no other import than this and `bgmpi.config`.
"""

from __future__ import annotations

from contextlib import nullcontext

from bgmpi.config import Config
from bgmpi.errors import UsageError
from bgmpi.report import Summary
from bgmpi.stop_request import StopRequest, stop_on_signals


def run_batch(config: Config, stop: StopRequest | None = None) -> Summary:
    """Collective over the world: run the job that `config` describes and return its summary on every rank.

    Raise a BgmpiError, the same on every rank, when the job cannot be run; rows that fail are no error of the job.
    A `stop` that is asked on any rank stops it at the next step with exit code 75, its state saved; None: SIGTERM and
    SIGUSR1 ask.
    """
    for value, flag in ((config.model, "--model DIR"), (config.input_file, "--input-file requests.jsonl")):
        if value is None:
            raise UsageError(f"nothing to run: give {flag}")
    from bgmpi.world import start_mpi

    with stop_on_signals() if stop is None else nullcontext(stop) as request:
        start_mpi()
        from bgmpi.engine import run

        return run(config, request)
