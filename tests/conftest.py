"""Marks, the header line, and the rule that a group which promised tests and ran none has failed.

A test belongs to one group: faults is the long part of the kills, mpi(n) launches n ranks, gpu needs a device, slurm
needs slurmctld, all others are serial.
`--must-run mpi2,mpi3` turns "nothing selected" and "everything skipped" of such a group into a failure, because a
suite that silently stops testing looks exactly like one that passes.

pytest-mpi's plugin is off (pyproject.toml): its mark of the same name means "run me under mpiexec", ours "I launch it".
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import settings

SLURM_HINT = "slurmctld is not installed: apt-get install -y --no-install-recommends slurm-wlm munge"
_MARKS = (
    "faults: what only `make test-faults` runs: most kills, and other long proofs",
    "mpi(n): launches a program on n ranks",
    "gpu: needs a GPU",
    "slurm: needs slurmctld",
    "slow: takes more than a few seconds",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --must-run."""
    parser.addoption(
        "--must-run", default="", metavar="GROUPS",
        help="groups, with commas (serial, mpi2, mpi3, mpi4, gpu, slurm, faults): each must run at least one test",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks, the counting of groups and the drawing of examples; refuse to run on several ranks."""
    # Every run draws the same examples, so that a change that breaks nothing stays green; the long searches under the
    # mark faults draw anew each time.
    settings.register_profile("steady", deadline=None, derandomize=True, database=None)
    settings.load_profile("steady")
    for mark in _MARKS:
        config.addinivalue_line("markers", mark)
    for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE"):
        if int(os.environ.get(name, "1")) > 1:
            raise pytest.UsageError(f"tests launch mpiexec themselves, but {name} says that pytest runs under one")
    promised = [name for name in config.getoption("--must-run").split(",") if name]
    config.pluginmanager.register(GroupCounts(promised), "group-counts")


def pytest_report_header() -> str:
    """Say which MPI the tests will meet, asked in another process so that MPI is not started in this one."""
    source = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.get_vendor())"
    asked = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False)
    vendor = asked.stdout.strip() if asked.returncode == 0 else "none: " + asked.stderr.strip().rpartition("\n")[2]
    return f"MPI: {vendor}; cores: {len(os.sched_getaffinity(0))}; Slurm: {_slurmctld() or 'none'}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put each test into its group, and skip what this machine cannot run."""
    gpu_missing = not _has_gpu() if any(item.get_closest_marker("gpu") for item in items) else False
    for item in items:
        group = _group(item)
        item.user_properties.append(("group", group))
        if item.get_closest_marker("slurm") and _slurmctld() is None:
            item.add_marker(pytest.mark.skip(reason=SLURM_HINT))
        if group == "gpu" and gpu_missing:
            item.add_marker(pytest.mark.skip(reason="no GPU here"))


class GroupCounts:
    """Counts what ran of each group, prints it, and fails the session where a promise was broken."""

    def __init__(self, promised: list[str]) -> None:
        self.promised = promised
        self.ran: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count one test: as run when its body was entered."""
        group = str(dict(report.user_properties).get("group", "serial"))
        if report.skipped:
            self.skipped[group] += 1
        elif report.when == "call":
            self.ran[group] += 1

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Turn success into failure where a promised group ran nothing."""
        if self._broken() and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print one line a group."""
        for group in sorted({*self.ran, *self.skipped, *self.promised}):
            broken = "  PROMISED, BUT NOTHING RAN" if group in self._broken() else ""
            terminalreporter.write_line(f"{group}: {self.ran[group]} run, {self.skipped[group]} skipped{broken}")

    def _broken(self) -> list[str]:
        return [group for group in self.promised if not self.ran[group]]


def _group(item: pytest.Item) -> str:
    for name in ("faults", "slurm", "gpu"):
        if item.get_closest_marker(name):
            return name
    mark = item.get_closest_marker("mpi")
    if mark is None:
        return "serial"
    if len(mark.args) != 1 or not isinstance(mark.args[0], int):
        raise pytest.UsageError(f"{item.nodeid}: the mark is mpi(n) with the number of ranks, got {mark}")
    return f"mpi{mark.args[0]}"


def _slurmctld() -> str | None:
    return shutil.which("slurmctld", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
