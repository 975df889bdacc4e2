"""What the environment says about how this process was started: which rank, of how many, with which cores.

Pure: an environment in, an answer out, so every launcher that was ever seen is a line in a test.  It exists because a
launcher that does not speak this MPI's language starts N programs that each believe to be rank 0 of 1, and all of them
would write the same file (conventions, Slurm; charliecloud#197).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bgmpi.errors import UsageError

RANK_VARIABLES = ("PMIX_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK")
# Who started this process says how many it started; the first that is set knows best, because `mpiexec` inside a Slurm
# batch script inherits Slurm's variables.
COUNT_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS")
# Slurm numbers the batch script and an interactive shell as steps too, from here up; no rank was started in them.
FIRST_SPECIAL_STEP = 0xFFFFFFF0


def launch_rank(environ: Mapping[str, str]) -> int | None:
    """Return the rank that a launcher gave this process, None outside of any."""
    names = (*RANK_VARIABLES, "SLURM_PROCID") if _in_slurm_step(environ) else RANK_VARIABLES
    return next((int(environ[name]) for name in names if environ.get(name, "").isdigit()), None)


def check_launch(size: int, environ: Mapping[str, str], *, allow_mismatch: bool = False) -> None:
    """Raise UsageError when the launcher started another number of ranks than MPI's world has (`size`)."""
    name = next((name for name in COUNT_VARIABLES if environ.get(name, "").isdigit()), None)
    if allow_mismatch or name is None or (name == "SLURM_NTASKS" and not _in_slurm_step(environ)):
        return
    if int(environ[name]) != size:
        raise UsageError(
            f"the launcher started {environ[name]} ranks ({name}) but MPI sees a world of {size}: launcher and MPI do "
            f"not match. Under Slurm start with `srun --mpi=pmi2` (MPICH) or `srun --mpi=pmix` (Open MPI), or with "
            f"`mpiexec`; --allow-rank-mismatch goes on all the same."
        )


def launch_command(mpiexec: str, python: str, ranks: int, words: Sequence[str]) -> list[str]:
    """Return the command that starts `ranks` ranks of `bgmpi run` with the same words.

    -P keeps the working folder off the path of modules: it may hold a folder `io`.
    """
    return [mpiexec, "-n", str(ranks), python, "-P", "-m", "bgmpi", "run", *words]


def threads_for(ranks: int, wanted: int | None, cores: int, allowed: str | None) -> int:
    """Return the threads each of a node's `ranks` may use so that all fit `cores`, and `allowed` (OMP_NUM_THREADS)."""
    if wanted is not None:
        return wanted
    fitting = max(1, cores // ranks)
    return min(fitting, int(allowed)) if allowed and allowed.isdigit() and int(allowed) else fitting


def _in_slurm_step(environ: Mapping[str, str]) -> bool:
    if int(environ.get("SLURM_PROCID", "0") or 0) > 0:
        return True
    step = environ.get("SLURM_STEP_ID", "")
    return step.isdigit() and int(step) < FIRST_SPECIAL_STEP
