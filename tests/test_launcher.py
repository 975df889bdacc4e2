"""What the environment of every launcher that was seen means."""

from __future__ import annotations

import pytest

from bgmpi.errors import UsageError
from bgmpi.launcher import check_launch, launch_rank, threads_for


@pytest.mark.parametrize(("environ", "rank"), [
    ({}, None),
    ({"PMI_RANK": "2"}, 2),
    ({"PMIX_RANK": "0"}, 0),
    ({"OMPI_COMM_WORLD_RANK": "5"}, 5),
    ({"SLURM_PROCID": "3", "SLURM_STEP_ID": "0"}, 3),
    ({"SLURM_PROCID": "0"}, None),
    ({"SLURM_PROCID": "0", "SLURM_STEP_ID": str(2**32 - 5)}, None),
])
def test_a_rank_is_one_that_a_launcher_started_and_not_a_batch_script(environ, rank):
    assert launch_rank(environ) == rank


@pytest.mark.parametrize(("ranks", "wanted", "cores", "allowed", "threads"), [
    (2, None, 8, None, 4), (3, None, 8, None, 2), (8, None, 2, None, 1), (2, None, 8, "1", 1), (2, None, 8, "16", 4),
    (2, 3, 8, None, 3), (2, None, 8, "", 4),
])
def test_ranks_times_threads_fit_the_cores_unless_told_otherwise(ranks, wanted, cores, allowed, threads):
    assert threads_for(ranks, wanted, cores, allowed) == threads


@pytest.mark.parametrize("environ", [
    {"SLURM_NTASKS": "4", "SLURM_PROCID": "2"},
    {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"},
    {"PMI_SIZE": "4"},
    {"OMPI_COMM_WORLD_SIZE": "2", "SLURM_NTASKS": "1"},
])
def test_n_copies_of_rank_0_of_1_are_refused_with_advice_c73(environ):
    with pytest.raises(UsageError, match="--mpi=pmi2"):
        check_launch(1, environ)
    check_launch(1, environ, allow_mismatch=True)


@pytest.mark.parametrize("environ", [
    {},
    {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
    {"PMI_SIZE": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"},
])
def test_a_shell_in_an_allocation_and_an_inner_mpiexec_are_fine(environ):
    check_launch(1, environ)
