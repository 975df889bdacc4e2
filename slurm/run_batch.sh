#!/bin/sh
# One batch of bgmpi as a Slurm job:
#
#   sbatch [-N nodes --ntasks-per-node=ranks ...] slurm/run_batch.sh [options of bgmpi run]
#
# Settings stand in env.sh beside this file.  The job's exit code is the program's.  Plain POSIX sh, because sites and
# users start it with whatever shell they have.
#SBATCH --job-name=bgmpi
#SBATCH --output=bgmpi-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR1@300
set -eu

say() { printf 'run_batch: %s\n' "$*"; }
fail() { say "$*" >&2; exit 2; }

# Print the folder of this script as it was submitted: Slurm runs a copy from its spool and shows path and arguments as
# one line.
submitted_from() {
    shown=$(scontrol show job "$SLURM_JOB_ID" 2> /dev/null | sed -n 's/^ *Command=//p' | head -n 1)
    if [ $# -gt 0 ]; then shown=${shown%" $*"}; fi
    case $shown in
        /*) dirname "$shown" ;;
        *) dirname "${SLURM_SUBMIT_DIR:-.}/$shown" ;;
    esac
}

find_settings() {
    if [ -n "${RUN_ENV:-}" ]; then printf '%s\n' "$RUN_ENV"; return; fi
    for folder in "$(dirname "$0")" "$(submitted_from "$@")" "${SLURM_SUBMIT_DIR:-.}/slurm" "${SLURM_SUBMIT_DIR:-.}"; do
        if [ -f "$folder/env.sh" ]; then printf '%s\n' "$folder/env.sh"; return; fi
    done
    printf 'nowhere\n'
}

find_program() {
    if [ -n "$RUN_VENV" ]; then printf '%s\n' "$RUN_VENV/bin/bgmpi"; return; fi
    beside=$(dirname "$settings")/../.venv/bin/bgmpi
    if [ -x "$beside" ]; then printf '%s\n' "$beside"; return; fi
    command -v bgmpi || true
}

# Print words so that a shell would read them back.
quoted() {
    for word in "$@"; do
        case $word in
            '' | *[!A-Za-z0-9_./:=,@%+-]*) printf "'%s' " "$(printf '%s' "$word" | sed "s/'/'\\\\''/g")" ;;
            *) printf '%s ' "$word" ;;
        esac
    done
}

[ -n "${SLURM_JOB_ID:-}" ] || fail "this is a Slurm job script: start it with sbatch $0 (without Slurm: bgmpi run --ranks N)"

settings=$(find_settings "$@")
case $settings in */*) ;; *) settings=./$settings ;; esac # `.` would search PATH
[ -f "$settings" ] || fail "no env.sh beside the script nor in ${SLURM_SUBMIT_DIR:-.}: set RUN_ENV to its path"
. "$settings"

if [ -n "$RUN_MODULES" ]; then
    command -v module > /dev/null || fail "RUN_MODULES is set ($RUN_MODULES) but this node has no module command"
    # shellcheck disable=SC2086 # names are split at spaces on purpose
    module load $RUN_MODULES
fi
program=$(find_program)
[ -x "$program" ] || fail "no bgmpi at '${program:-PATH}': set RUN_VENV to the virtual environment that holds it"

# The repository's folders kernels/ and io/ must never be importable from the working directory.
export PYTHONSAFEPATH=1
# Newer srun does not take the job's cores a task over by itself.
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"; fi

# One bad rank ends all (-K), and Slurm then reports the signal that ended the others.  So the first rank that fails
# notes its exit code here; a program that ends itself by MPI_Abort, which is a signal too, may note it before.  The trap
# keeps the noting shell alive when ranks are told to stop; they do not inherit it.
RUN_CODE_FILE=$PWD/.bgmpi-$SLURM_JOB_ID.code
export RUN_CODE_FILE
rm -f "$RUN_CODE_FILE"
# shellcheck disable=SC2016 # expanded by the rank's shell
note='trap : USR1 TERM; "$@"; code=$?
if [ $code -ne 0 ] && [ $code -lt 128 ]; then (set -C; echo $code > "$RUN_CODE_FILE") 2> /dev/null; fi; exit $code'

say "job $SLURM_JOB_ID, ${SLURM_NTASKS:-?} ranks on ${SLURM_JOB_NUM_NODES:-?} nodes (${SLURM_JOB_NODELIST:-?}), settings $settings"
say "model '${BGMPI_MODEL:-}', input '${BGMPI_INPUT_FILE:-}', output '${BGMPI_OUTPUT_FILE:-}'"
# shellcheck disable=SC2086 # flags are split at spaces on purpose
say "$(quoted srun --kill-on-bad-exit=1 "--mpi=$RUN_MPI" $RUN_SRUN_FLAGS "$program" run "$@")"

code=0
# shellcheck disable=SC2086
srun --kill-on-bad-exit=1 "--mpi=$RUN_MPI" $RUN_SRUN_FLAGS sh -c "$note" sh "$program" run "$@" || code=$?
if [ "$code" -ne 0 ] && [ -s "$RUN_CODE_FILE" ]; then code=$(cat "$RUN_CODE_FILE"); fi
rm -f "$RUN_CODE_FILE"
exit "$code"
