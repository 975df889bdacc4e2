"""Starts programs for tests under a hard time limit, and says what they were doing when they did not end.

A hanging rank is the normal way in which MPI programs fail, and in-process MPI tests hide it: one rank raises, the
others wait for ever.  So a test here is one plain pytest process that launches `mpiexec -n N ...` and looks at what
comes out.  When the limit passes, every process of the launch gets SIGABRT (Python then prints the stack of each
thread, because PYTHONFAULTHANDLER is set), then SIGKILL, and the test fails with all that was printed.

It knows nothing of pytest's marks but `on_ranks`, and nothing of what is launched.
"""

from __future__ import annotations

import inspect
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

# What a launcher leaves in the environment: a launch from inside another job must not believe itself part of it.
_LAUNCHERS = ("SLURM_", "PMI_", "PMIX_", "HYDRA_", "OMPI_", "MPI_LOCAL")


@dataclass(frozen=True, slots=True)
class Ended:
    """What a launch left behind.  `returncode` is negative where a signal ended the launcher itself."""

    argv: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str
    seconds: float

    def __str__(self) -> str:
        return (
            f"{shlex.join(self.argv)}\nexit code {self.returncode} after {self.seconds:.1f} s\n"
            f"--- stdout ---\n{self.stdout}\n--- stderr ---\n{self.stderr}"
        )


class LaunchHung(AssertionError):
    """The launch passed its limit; the message holds its output and the stacks of its Python processes."""


def launch(
    argv: Sequence[str | Path],
    *,
    limit: float = 120,
    expect: int | None = None,
    env: Mapping[str, str | None] | None = None,
    cwd: Path | None = None,
) -> Ended:
    """Run `argv` to its end and return what it left.

    limit: seconds until everything that it started is killed and LaunchHung raised.  expect: the exit code wanted,
    None for any; another one is an AssertionError with all output.  env: changes to the environment (None removes).
    """
    words = tuple(str(word) for word in argv)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        began = time.monotonic()
        # Files and not pipes: an orphan that holds a pipe open would keep us reading past the limit.
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=cwd, env=_environment(env or {}),
            start_new_session=True,
        )  # fmt: skip
        hung = False
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            hung = True
        finally:
            if process.poll() is None:
                _end_tree(process)
        ended = Ended(words, process.returncode, _text(out), _text(err), time.monotonic() - began)
    if hung:
        raise LaunchHung(f"no end within {limit:g} s: {ended}")
    if expect is not None and ended.returncode != expect:
        raise AssertionError(f"expected exit code {expect}: {ended}")
    return ended


def mpiexec(
    ranks: int,
    argv: Sequence[str | Path],
    *,
    limit: float = 120,
    expect: int | None = None,
    env: Mapping[str, str | None] | None = None,
    cwd: Path | None = None,
) -> Ended:
    """Run `argv` on that many ranks; the other arguments are those of `launch`.

    The environment variable MPIEXEC_FLAGS holds flags for the site's mpiexec (Open MPI: --oversubscribe).
    """
    flags = shlex.split(os.environ.get("MPIEXEC_FLAGS", ""))
    words = [script("mpiexec"), *flags, "-n", str(ranks), *argv]
    return launch(words, limit=limit, expect=expect, env=env, cwd=cwd)


def python_on_ranks(
    ranks: int,
    body: Callable[[], None] | str,
    *arguments: str | Path,
    limit: float = 60,
    expect: int | None = 0,
    env: Mapping[str, str | None] | None = None,
    cwd: Path | None = None,
) -> Ended:
    """Run Python on that many ranks; an exception on one rank ends all of them.

    body: source text, or a function without parameters that imports inside itself all that it uses (its source is
    what travels).  arguments: become sys.argv[1:].
    """
    source = body if isinstance(body, str) else _source_of(body)
    argv = [sys.executable, "-m", "mpi4py", "-c", textwrap.dedent(source), *arguments]
    return mpiexec(ranks, argv, limit=limit, expect=expect, env=env, cwd=cwd)


def bgmpi(
    ranks: int,
    *arguments: str | Path,
    limit: float = 120,
    expect: int | None = None,
    env: Mapping[str, str | None] | None = None,
    cwd: Path | None = None,
) -> Ended:
    """Run the console script `bgmpi` on that many ranks, without any launcher when `ranks` is 0."""
    argv = [script("bgmpi"), *arguments]
    if ranks == 0:
        return launch(argv, limit=limit, expect=expect, env=env, cwd=cwd)
    return mpiexec(ranks, argv, limit=limit, expect=expect, env=env, cwd=cwd)


def script(name: str) -> Path:
    """Return the path of an installed command, the one beside this Python first."""
    beside = Path(sys.executable).with_name(name)
    found = beside if beside.exists() else shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"{name} is neither beside {sys.executable} nor on PATH: `make install` puts it there")
    return Path(found)


def on_ranks(*counts: int) -> pytest.MarkDecorator:
    """Return a decorator that runs a test once for each count as its argument `ranks`, with the mark mpi(count).

    One rank needs no launcher and stays in the serial group.
    """
    cases = [pytest.param(count, marks=pytest.mark.mpi(count) if count > 1 else ()) for count in counts]
    return pytest.mark.parametrize("ranks", cases)


def _source_of(function: Callable[[], None]) -> str:
    return f"{textwrap.dedent(inspect.getsource(function))}\n{function.__name__}()\n"


def _environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    result = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith((*_LAUNCHERS, "BGMPI_")) or name == "SLURM_CONF"
    }
    result |= {"PYTHONFAULTHANDLER": "1", "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    # More ranks than cores: a rank that waits in MPICH must give its core away at once.
    result.setdefault("MPIR_CVAR_ENABLE_HEAVY_YIELD", "1")
    for name, value in changes.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = value
    return result


def _end_tree(process: subprocess.Popen[bytes]) -> None:
    """Make every Python below `process` print its stacks, then kill all of them."""
    tree = _descendants(process.pid)
    _signal([pid for pid in tree if _is_python(pid)], signal.SIGABRT)
    deadline = time.monotonic() + 3
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    _signal([process.pid, *tree, *_descendants(process.pid)], signal.SIGKILL)
    process.wait()


def _descendants(pid: int) -> list[int]:
    try:
        children = [int(word) for path in Path(f"/proc/{pid}/task").glob("*/children") for word in
                    path.read_text().split()]  # fmt: skip
    except OSError:
        return []
    return [found for child in children for found in (child, *_descendants(child))]


def _is_python(pid: int) -> bool:
    try:
        return "python" in Path(f"/proc/{pid}/exe").readlink().name
    except OSError:
        return False


def _signal(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _text(file: object) -> str:
    assert hasattr(file, "seek") and hasattr(file, "read")
    file.seek(0)
    data: bytes = file.read()
    return data.decode(errors="replace")
