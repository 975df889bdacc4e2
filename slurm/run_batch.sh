#!/bin/sh
# One batch of bgmpi as a Slurm job:
#
#   sbatch [-N nodes --ntasks-per-node=ranks ...] slurm/run_batch.sh [options of bgmpi run]
#
# Settings stand in env.sh beside this file.  The job's exit code is the program's; told to stop, or when a rank died, it
# requeues itself and goes on where it stood.  Plain POSIX sh, because sites and users start it with whatever shell they
# have.
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
: "${RUN_ON_STOP:=requeue}" "${RUN_MAX_RESTARTS:=20}" # an older copy of env.sh has them not
case $RUN_ON_STOP in requeue | stay | exit) ;; *) fail "RUN_ON_STOP is '$RUN_ON_STOP': expected requeue, stay or exit" ;; esac
case $RUN_MAX_RESTARTS in *[!0-9]*) fail "RUN_MAX_RESTARTS is '$RUN_MAX_RESTARTS': expected a number" ;; esac

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

# When this job will be ended, for --stop-before-walltime; older Slurms do not say.
if [ -z "${SLURM_JOB_END_TIME:-}" ]; then
    end=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e 2> /dev/null | head -n 1)
    SLURM_JOB_END_TIME=$(date -d "$end" +%s 2> /dev/null) || SLURM_JOB_END_TIME=
    export SLURM_JOB_END_TIME
fi

attempt=${SLURM_RESTART_COUNT:-0}
say "attempt $attempt of job $SLURM_JOB_ID, ${SLURM_NTASKS:-?} ranks on ${SLURM_JOB_NUM_NODES:-?} nodes (${SLURM_JOB_NODELIST:-?}), settings $settings"
say "model '${BGMPI_MODEL:-}', input '${BGMPI_INPUT_FILE:-}', output '${BGMPI_OUTPUT_FILE:-}'"
# shellcheck disable=SC2086 # flags are split at spaces on purpose
say "$(quoted srun --kill-on-bad-exit=1 "--mpi=$RUN_MPI" $RUN_SRUN_FLAGS "$program" run "$@")"

# Whoever tells this shell alone to stop (sbatch --signal=B:..., scancel --batch) means the ranks.  They get USR1 in any
# case: what srun does with a TERM is to end them unsaved.
pass_on() {
    say "told to stop: passing it on to the ranks"
    kill -USR1 "$srun" 2> /dev/null || :
}

# Is another attempt worth it?  After a stop with all saved (75) and after a rank's death; not when the batch system itself
# has ended the job (cancelled, out of time, preempted): then it decides what follows.
worth_another() {
    if [ "$code" -ne 75 ] && [ "$code" -lt 128 ]; then return 1; fi
    if [ "$RUN_ON_STOP" = exit ]; then return 1; fi
    state=$(scontrol show job "$SLURM_JOB_ID" 2> /dev/null | sed -n 's/.*JobState=\([A-Z]*\).*/\1/p' | head -n 1)
    if [ "$state" != RUNNING ]; then
        say "the batch system has ended this job (${state:-unknown}): it is not requeued from here"
        return 1
    fi
    if [ "$attempt" -ge "$RUN_MAX_RESTARTS" ]; then
        say "attempt $attempt was the last of RUN_MAX_RESTARTS=$RUN_MAX_RESTARTS: not again"
        return 1
    fi
}

# Shared memory that a killed MPI left behind is named after job and step: a step of the same number would wait for it
# for ever.  So attempt k lets k empty steps pass first.
skipped=0
while [ "$skipped" -lt "$attempt" ]; do
    srun --nodes=1 --ntasks=1 --mpi=none true || :
    skipped=$((skipped + 1))
done

trap pass_on USR1 TERM
# shellcheck disable=SC2086
srun --kill-on-bad-exit=1 "--mpi=$RUN_MPI" $RUN_SRUN_FLAGS sh -c "$note" sh "$program" run "$@" &
srun=$!
while :; do # a signal ends a wait, not what is waited for
    code=0
    wait "$srun" || code=$?
    kill -0 "$srun" 2> /dev/null || break
done
if [ "$code" -ne 0 ] && [ -s "$RUN_CODE_FILE" ]; then code=$(cat "$RUN_CODE_FILE"); fi
rm -f "$RUN_CODE_FILE"

if worth_another; then
    if [ "$RUN_ON_STOP" = stay ]; then
        say "ended with code $code; staying until the batch system ends and requeues this job"
        while :; do sleep 60 & wait $! || :; done
    fi
    say "ended with code $code; requeueing, restart $((attempt + 1)) of at most $RUN_MAX_RESTARTS"
    scontrol requeue "$SLURM_JOB_ID" || say "it could not be requeued: start it again by hand, it goes on where it stood"
fi
exit "$code"
