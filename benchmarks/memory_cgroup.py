"""A memory cgroup of a benchmark's own: what a process inside may take, page cache included, ends at a hard limit.

Only such a limit shows what "does not fit" means: on a machine with free memory the page cache keeps a model that a
budget flag calls too large.  Both versions of cgroups are tried where this process already is; where none can be made
(no right to, or no controller for memory) the reason is said and nothing is measured, never something else instead.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
_GIVE_UP = 10.0


@dataclass(frozen=True, slots=True)
class Cgroup:
    """One cgroup.  folder: where its files are; peak: which of them tells the most that it held."""

    folder: Path
    peak: str

    def prefix(self) -> list[str]:
        """Return the words before a command that put it inside."""
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.folder / "cgroup.procs")]

    def peak_bytes(self) -> int:
        """Return the most bytes that were held at once, page cache included; 0 where the system does not tell."""
        file = self.folder / self.peak
        return int(file.read_text()) if file.exists() else 0


@contextmanager
def memory_cgroup(limit: int) -> Iterator[Cgroup | str]:
    """Make a cgroup that holds at most `limit` bytes, swap not counted; give it, or why there is none."""
    made = _make(f"bgmpi-benchmark-{os.getpid()}", limit)
    try:
        yield made
    finally:
        if isinstance(made, Cgroup):
            _remove(made.folder)


def _make(name: str, limit: int) -> Cgroup | str:
    places = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    v1 = next((path for kinds, path in places.items() if "memory" in kinds.split(",")), None)
    try:
        if v1 is not None:
            folder = _V1 / v1.lstrip("/") / name
            folder.mkdir()
            (folder / "memory.limit_in_bytes").write_text(str(limit))
            return Cgroup(folder, "memory.max_usage_in_bytes")
        if "" not in places:
            return "no cgroup of this process is known"
        parent = _V2 / places[""].lstrip("/")
        (parent / "cgroup.subtree_control").write_text("+memory")
        folder = parent / name
        folder.mkdir()
        (folder / "memory.max").write_text(str(limit))
        return Cgroup(folder, "memory.peak")
    except OSError as error:
        return f"{error.filename}: {error.strerror}"


def _remove(folder: Path) -> None:
    """Remove an empty cgroup; the system may need a moment after its last process ended."""
    begun = time.monotonic()
    while True:
        try:
            folder.rmdir()
            return
        except OSError:
            if time.monotonic() - begun > _GIVE_UP:
                raise
            time.sleep(0.1)
