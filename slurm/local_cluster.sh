#!/usr/bin/env bash
# A real Slurm on one host, private to its user: munged, slurmctld and N slurmd that act as the nodes n1..nN.
#
#   slurm/local_cluster.sh start [N]           start N nodes (4); does nothing when they are up
#   slurm/local_cluster.sh stop                cancel jobs, end the daemons, keep the logs
#   slurm/local_cluster.sh status              exit 0 when all nodes are usable; show nodes and jobs
#   eval "$(slurm/local_cluster.sh env)"       let sbatch, srun, squeue of this shell speak to it
#
# For tests: virtual nodes count as different nodes for MPI, so paths between nodes run for real.  It needs neither
# root nor systemd nor a fixed port nor a host name that resolves; two users, or one user with two folders, do not
# meet.  Only processes whose id it recorded, and that still are the program recorded, are ever ended.
#
# Needs: apt-get install -y --no-install-recommends slurm-wlm munge
# Settings: LOCAL_CLUSTER_DIR (its folder), LOCAL_CLUSTER_CPUS (a node, 4), LOCAL_CLUSTER_MEMORY (MB a node, 4000).
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin

folder=${LOCAL_CLUSTER_DIR:-${TMPDIR:-/tmp}/bgmpi-cluster-$(id -u)}
cpus=${LOCAL_CLUSTER_CPUS:-4}
memory=${LOCAL_CLUSTER_MEMORY:-4000}
export SLURM_CONF=$folder/slurm.conf

say() { echo "local_cluster: $*"; }
fail() { say "$*" >&2; exit 1; }

# --- processes: by recorded id only ---------------------------------------------------------------------------------

runs() { # runs NAME PROGRAM: is the process recorded as NAME alive, and is it PROGRAM?
    local pid line
    pid=$(cat "$folder/run/$1.pid" 2>/dev/null) || return 1
    line=$(cat "/proc/${pid:-none}/stat" 2>/dev/null) || return 1
    [[ $line == "$pid ($2"*") "[^ZX]* ]]
}

end() { # end NAME PROGRAM: ask it to end, insist after five seconds
    local pid
    runs "$1" "$2" || { rm -f "$folder/run/$1.pid"; return 0; }
    pid=$(cat "$folder/run/$1.pid")
    kill "$pid" 2>/dev/null || true
    wait_until 50 gone "$1" "$2" || kill -KILL "$pid" 2>/dev/null || true
    rm -f "$folder/run/$1.pid"
}

gone() { ! runs "$@"; }

wait_until() { # wait_until TENTHS COMMAND...: succeed as soon as COMMAND does
    local tenths=$1
    shift
    while ! "$@"; do
        ((tenths-- > 0)) || return 1
        sleep 0.1
    done
}

# --- the cluster ----------------------------------------------------------------------------------------------------

nodes_recorded() { cat "$folder/nodes" 2>/dev/null || echo 0; }

usable_nodes() { timeout 5 sinfo -h -N -t idle,alloc,mix,comp -o %N 2>/dev/null | sort -u | wc -l; }

all_usable() { [ "$(usable_nodes)" = "$(nodes_recorded)" ]; }

up() {
    local node nodes
    nodes=$(nodes_recorded)
    [ "$nodes" -gt 0 ] || return 1
    runs munged munged && runs slurmctld slurmctld || return 1
    for node in $(seq "$nodes"); do runs "slurmd.n$node" slurmd || return 1; done
    all_usable
}

free_port() { # a range of N + 1 ports that nobody listens on, below those that the kernel hands out
    local first port nodes=$1
    for first in $(shuf -i 20000-31000 -n 50); do
        for port in $(seq "$first" $((first + nodes))); do
            if (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then continue 2; fi
        done
        echo "$first"
        return 0
    done
    fail "no free ports between 20000 and 31000"
}

configure() { # configure N
    local nodes=$1 host user port
    host=$(hostname -s) user=$(id -un) port=$(free_port "$1")
    # FirstJobId: MPICH names shared memory after the job, so a second cluster must not count from 1 again.
    # cred_expire: how soon a requeued job may start again is counted from it (127 s by default).
    # linuxproc and task/none: no cgroups, so no root.  InactiveLimit 0: a test that thinks is not dead.
    cat > "$SLURM_CONF" <<CONF
ClusterName=local
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
AuthInfo=socket=$folder/run/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool/%n
TmpFS=$folder/tmp/%n
SlurmctldPidFile=$folder/run/slurmctld.pid
SlurmdPidFile=$folder/run/slurmd.%n.pid
SlurmctldLogFile=$folder/log/slurmctld.log
SlurmdLogFile=$folder/log/slurmd.%n.log
JobCompType=jobcomp/filetxt
JobCompLoc=$folder/log/jobs.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=5
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=pmi2
PropagateResourceLimitsExcept=MEMLOCK
FirstJobId=$(($(date +%s) % 60000000 + 1000))
JobRequeue=1
ReturnToService=2
KillWait=5
MinJobAge=600
InactiveLimit=0
SlurmctldTimeout=30
SlurmdTimeout=30
NodeName=n[1-$nodes] NodeHostname=$host NodeAddr=127.0.0.1 Port=[$((port + 1))-$((port + nodes))] CPUs=$cpus RealMemory=$memory State=UNKNOWN
PartitionName=main Nodes=n[1-$nodes] Default=YES DefaultTime=60 MaxTime=INFINITE State=UP
CONF
}

start() {
    local nodes=${1:-4} program node
    [[ $nodes =~ ^[1-9][0-9]?$ ]] || fail "expected 1 to 99 nodes, got $nodes"
    if [ "$(nodes_recorded)" = "$nodes" ] && up; then say "already up: $nodes nodes"; return 0; fi
    for program in munged slurmctld slurmd sbatch; do
        command -v "$program" > /dev/null ||
            fail "$program is missing: apt-get install -y --no-install-recommends slurm-wlm munge"
    done
    [[ $folder != *[[:space:]]* ]] || fail "Slurm cannot read paths with spaces; set LOCAL_CLUSTER_DIR, got $folder"
    stop > /dev/null
    rm -rf "$folder/state" "$folder/spool" "$folder/tmp"
    mkdir -p "$folder"/{run,log,state,spool,tmp}
    chmod 755 "$folder" "$folder/run" # munge refuses a socket in a folder that others cannot enter
    if [ ! -s "$folder/munge.key" ]; then (umask 077 && head -c 1024 /dev/urandom > "$folder/munge.key"); fi
    echo "$nodes" > "$folder/nodes"
    configure "$nodes"
    munged --force --num-threads=2 --key-file="$folder/munge.key" --socket="$folder/run/munge.socket" \
        --pid-file="$folder/run/munged.pid" --seed-file="$folder/run/munge.seed" --log-file="$folder/log/munged.log"
    wait_until 50 test -S "$folder/run/munge.socket" || fail "munged did not come up, see $folder/log/munged.log"
    slurmctld -c
    for node in $(seq "$nodes"); do
        mkdir -p "$folder/spool/n$node" "$folder/tmp/n$node"
        slurmd -N "n$node"
    done
    if ! wait_until 300 up; then
        sinfo -N -l >&2 || true
        tail -n 5 "$folder"/log/slurm*.log >&2
        fail "the nodes did not become usable within 30 s; logs are in $folder/log"
    fi
    say "up: $nodes nodes, SLURM_CONF=$SLURM_CONF"
}

stop() {
    local node
    if runs slurmctld slurmctld; then
        timeout 5 scancel -u "$(id -un)" 2> /dev/null || true
        wait_until 80 no_jobs || say "jobs did not end within 8 s"
    fi
    for node in $(seq "$(nodes_recorded)"); do end "slurmd.n$node" slurmd; done
    end slurmctld slurmctld
    end munged munged
    rm -f "$folder/nodes"
    say "stopped"
}

no_jobs() { [ -z "$(timeout 5 squeue -h 2> /dev/null)" ]; }

case ${1:-} in
    start) start "${2:-4}" ;;
    stop) stop ;;
    status)
        up || fail "down"
        sinfo -N -l
        squeue
        ;;
    env) printf 'export SLURM_CONF=%q\n' "$SLURM_CONF" ;;
    *)
        sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
        exit 2
        ;;
esac
