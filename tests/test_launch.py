"""Laws of tests/launch.py: what is launched ends, and says why it did not."""

from __future__ import annotations

import sys

import pytest
from launch import LaunchHung, launch, mpiexec, on_ranks, python_on_ranks


def test_exit_code_and_output_come_back() -> None:
    ended = launch([sys.executable, "-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(66)"])
    assert (ended.returncode, ended.stdout, ended.stderr) == (66, "out\n", "err\n")


def test_an_unexpected_exit_code_shows_the_output() -> None:
    with pytest.raises(AssertionError, match=r"(?s)expected exit code 0.*exit code 3.*why it died"):
        launch([sys.executable, "-c", "print('why it died'); raise SystemExit(3)"], expect=0)


def test_a_launch_inside_a_job_forgets_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "7")
    monkeypatch.setenv("BGMPI_MODEL", "elsewhere")
    source = "import os; print(*(os.environ.get(name) for name in ('SLURM_NTASKS', 'BGMPI_MODEL', 'OMP_NUM_THREADS')))"
    assert launch([sys.executable, "-c", source]).stdout == "None None 1\n"


def sum_of_ranks() -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    total = world.allreduce(world.rank)
    if world.rank == 0:
        print(world.size, total)


@on_ranks(1, 2, 3, 4)
def test_ranks_form_one_world(ranks: int) -> None:
    assert python_on_ranks(ranks, sum_of_ranks).stdout.split() == [str(ranks), str(ranks * (ranks - 1) // 2)]


@pytest.mark.mpi(2)
def test_one_failing_rank_ends_all() -> None:
    source = """
    from mpi4py import MPI
    if MPI.COMM_WORLD.rank == 1:
        raise ValueError("rank one is ill")
    MPI.COMM_WORLD.barrier()
    """
    ended = python_on_ranks(2, source, expect=None)
    assert ended.returncode != 0
    assert "rank one is ill" in ended.stderr


@pytest.mark.mpi(2)
def test_a_hanging_rank_is_ended_and_shows_its_stack() -> None:
    source = """
import time
def waits_for_ever():
    time.sleep(1000)
waits_for_ever()
"""
    with pytest.raises(LaunchHung, match=r"(?s)no end within 2 s.*line 4 in waits_for_ever"):
        mpiexec(2, [sys.executable, "-c", source], limit=2)
