# The settings of slurm/run_batch.sh.  Read by sh: NAME=value, quotes around spaces.  Edit a copy and point RUN_ENV at
# it, or set any of these before sbatch: what is in the environment wins.
#
# BGMPI_*  options of `bgmpi run` (every flag is such a variable: bgmpi run --help); words behind the script on
#          sbatch's command line win over them.  Empty means not set.
# RUN_*    how run_batch.sh starts it.
# Nodes, ranks, cores and time are sbatch's own flags: sbatch -N 4 --ntasks-per-node=2 -c 16 -t 4:00:00 slurm/run_batch.sh

# --- what to run ----------------------------------------------------------------------------------------------------

# Folder of the checkpoint in Hugging Face layout; relative paths start where sbatch was called.
export BGMPI_MODEL="${BGMPI_MODEL:-}"

# Requests, one JSON object a line (OpenAI batch format).
export BGMPI_INPUT_FILE="${BGMPI_INPUT_FILE:-}"

# Results, HDF5.
export BGMPI_OUTPUT_FILE="${BGMPI_OUTPUT_FILE:-results.h5}"

# A TOML file with further options.
export BGMPI_CONFIG="${BGMPI_CONFIG:-}"

# --- how to start it ------------------------------------------------------------------------------------------------

# The MPI plugin of srun, as the MPI was built: pmi2 (MPICH, Intel MPI), pmix (Open MPI); `srun --mpi=list` shows them.
RUN_MPI="${RUN_MPI:-pmi2}"

# The virtual environment that holds bgmpi; empty: .venv beside the folder slurm/, else bgmpi on PATH.
RUN_VENV="${RUN_VENV:-}"

# Environment modules to load first, such as "python/3.12 mpich/4.3"; empty: none.
RUN_MODULES="${RUN_MODULES:-}"

# Further flags for srun, such as "--cpu-bind=cores"; they are split at spaces.
RUN_SRUN_FLAGS="${RUN_SRUN_FLAGS:-}"

# What follows a stop with all saved (exit code 75) or a rank's death: requeue (this job starts again), stay (it waits to
# be ended, where the site's preemption requeues it), exit.
RUN_ON_STOP="${RUN_ON_STOP:-requeue}"

# How often it may start again.
RUN_MAX_RESTARTS="${RUN_MAX_RESTARTS:-20}"
