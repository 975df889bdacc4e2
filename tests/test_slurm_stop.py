"""A Slurm job that is told to stop, or loses a rank, requeues itself and ends with every answer; a cancelled one stays
away.  Every way in which a batch system tells it is tried on a real Slurm, on one node and on two."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from pathlib import Path

import jobs
import pytest
from launch import Ended, launch, script
from signal_at import signal_words
from test_resume import Answers, finished, words, work
from test_slurm import SCRIPTS, Cluster
from virtual_nodes import virtual_nodes

__all__ = ["work"]
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

STEP = "bgmpi.executor:Executor.step"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with virtual_nodes(2) as nodes:
        yield Cluster(nodes.environment)


def start(
    cluster: Cluster, work: tuple[Path, Path, Answers], folder: Path, deed: str, *, nodes: int = 2, rank: int | str = 1,
    **settings: str,
) -> tuple[Ended, str]:  # fmt: skip
    """Run the job on two ranks, something being done to one in its first attempt; return its end and its log."""
    model, requests, _ = work
    venv = folder / "venv"
    (venv / "bin").mkdir(parents=True, exist_ok=True)
    program = venv / "bin" / "bgmpi"
    before = shlex.join(str(word) for word in signal_words(rank, deed, STEP, 9))
    program.write_text(f'#!/bin/sh\nexec {before if deed else shlex.quote(str(script("bgmpi")))} "$@"\n')
    program.chmod(0o755)
    said = words(model, requests, folder / "out.h5", "--checkpoint-interval", "600")
    return cluster.sbatch(
        folder, ["-N", str(nodes), "-n", "2", "--overcommit", SCRIPTS / "run_batch.sh", *said],
        env={"RUN_VENV": str(venv), "BGMPI_THREADS": "1", **settings}, limit=200,
    )  # fmt: skip


LONG = pytest.mark.faults


@pytest.mark.parametrize(("deed", "nodes", "rank"), [
    ("USR1", 1, 1),
    ("scancel --batch --signal=USR1 $SLURM_JOB_ID", 2, 0),
    pytest.param("scancel --signal=USR1 $SLURM_JOB_ID", 2, 0, marks=LONG),
    pytest.param("scancel --batch --signal=USR1 $SLURM_JOB_ID", 1, 0, marks=LONG),
    pytest.param("TERM", 2, 1, marks=LONG),
    pytest.param("KILL", 1, 1, marks=LONG),
    ("KILL", 2, 0),
])  # fmt: skip
def test_a_job_told_to_stop_or_bereft_of_a_rank_requeues_itself_and_ends_well(
    cluster: Cluster, work: tuple[Path, Path, Answers], tmp_path: Path, deed: str, nodes: int, rank: int
) -> None:
    ended, log = start(cluster, work, tmp_path, deed, nodes=nodes, rank=rank)
    assert ended.returncode == 3, f"{ended}\n{log}"  # the input has one bad row
    assert "requeueing, restart 1 of at most 20" in log and "attempt 1 of job" in log
    assert jobs.tokens_of(tmp_path / "out.h5") == work[2]
    if deed != "KILL":
        assert "are begun with" in log and "run again to go on" in log


@pytest.mark.parametrize(("deed", "code"), [("USR1", 75), ("KILL", None)])
def test_c76_without_restarts_the_script_ends_with_the_code(
    cluster: Cluster, work: tuple[Path, Path, Answers], tmp_path: Path, deed: str, code: int | None
) -> None:
    began = time.monotonic()
    ended, log = start(cluster, work, tmp_path, deed, RUN_MAX_RESTARTS="0")
    assert ended.returncode == code if code else ended.returncode >= 128, f"{ended}\n{log}"
    assert "RUN_MAX_RESTARTS=0: not again" in log and time.monotonic() - began < 60


def test_a_cancelled_job_stays_away_and_another_goes_on(
    cluster: Cluster, work: tuple[Path, Path, Answers], tmp_path: Path
) -> None:
    ended, log = start(cluster, work, tmp_path, "scancel $SLURM_JOB_ID")
    assert not (tmp_path / "out.h5").exists() and "requeueing" not in log, f"{ended}\n{log}"
    time.sleep(3)  # a job that is requeued waits in the queue for some seconds
    shown = launch(["squeue", "--noheader"], env=cluster.environment, expect=0).stdout
    assert not shown.strip(), shown
    assert finished(tmp_path / "out.h5")
    ended, log = start(cluster, work, tmp_path, "")
    assert ended.returncode == 3 and "attempt 2 goes on" in log, f"{ended}\n{log}"
    assert jobs.tokens_of(tmp_path / "out.h5") == work[2]
