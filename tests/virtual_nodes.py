"""Runs a test's body on several virtual Slurm nodes of this machine, which MPI takes for different nodes.

The Slurm is the project's own (slurm/local_cluster.sh); a body is launched by srun, under a hard limit as in `launch`.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from launch import Ended, launch

SCRIPT = Path(__file__).parents[1] / "slurm" / "local_cluster.sh"


@dataclass(frozen=True, slots=True)
class Nodes:
    """A running cluster, as the environment that its commands need."""

    environment: Mapping[str, str]

    def python(self, nodes: int, ranks: int, body: Callable[[], None], *, limit: float = 120) -> Ended:
        """Run a body (see launch.python_on_ranks) on that many ranks over that many nodes; it must end with 0."""
        begin = "from bgmpi.world import start_mpi\nstart_mpi()\n"
        source = f"{begin}{textwrap.dedent(inspect.getsource(body))}\n{body.__name__}()\n"
        words = ["srun", "--kill-on-bad-exit=1", "--mpi=pmi2", f"--nodes={nodes}", f"--ntasks={ranks}"]
        program = [sys.executable, "-m", "mpi4py", "-c", source]
        return launch([*words, *program], env=self.environment, limit=limit, expect=0)


@contextmanager
def virtual_nodes(count: int) -> Iterator[Nodes]:
    """Start that many nodes, and stop them at the end."""
    # A short path: the daemons' sockets have at most 107 letters.
    with tempfile.TemporaryDirectory(prefix="bgmpi-nodes-") as folder:
        own = {"LOCAL_CLUSTER_DIR": folder}
        try:
            launch([SCRIPT, "start", str(count)], env=own, limit=60, expect=0)
            told = launch([SCRIPT, "env"], env=own, expect=0).stdout
            yield Nodes({"SLURM_CONF": told.removeprefix("export SLURM_CONF=").strip()})
        finally:
            launch([SCRIPT, "stop"], env=own, limit=60)
