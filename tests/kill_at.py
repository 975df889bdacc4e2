"""Runs `bgmpi` and kills at one exact instant: python kill_at.py VICTIM SITE WHEN COUNT run --model ...

VICTIM: a rank's number (it kills itself); all (every rank of the launch); launcher, step or batch (mpiexec, srun, the
batch shell of Slurm: rank 0 kills it and goes on as it can); nobody.  Behind a colon the signal's name, KILL when there
is none: 1:TERM.
SITE: module:function or module:Class.method, and behind a # a word that must occur in the call's arguments.
WHEN: before or after its COUNT-th call; half: within it, when only the first half of the bytes that it writes is
written; or ms: COUNT milliseconds after its first call.

SIGKILL flushes, closes and tells nothing.  Where the environment names a folder in KILL_NOTES, every token that a rank
draws is noted there, and the moment of the kill, by plain appends that survive it (`read_notes`); processes that carry
the same folder belong to the launch.  `kill_words` builds the command for tests.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NOTES = "KILL_NOTES"
NOBODY = "nobody"
#: sequence, how many tokens it had drawn before, seconds since 1970
DRAWN = struct.Struct("<qqd")
_LAUNCHERS = {"launcher": ("mpiexec", "mpiexec.hydra"), "step": ("srun",), "batch": ("slurm_script",)}


def find(site: str) -> tuple[Any, str, str]:
    """Return the owner of a site, the name it has there, and the word that its arguments must hold."""
    path, _, word = site.partition("#")
    module, _, path = path.partition(":")
    owner: Any = importlib.import_module(module)
    *classes, name = path.split(".")
    for one in classes:
        owner = getattr(owner, one)
    return owner, name, word


def arm(site: str, when: str, count: int, strike: Callable[[], None]) -> None:
    """Let `strike` happen at the `count`-th call of `site`."""
    owner, name, word = find(site)
    function, calls = getattr(owner, name), 0

    @functools.wraps(function)
    def deadly(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        meant = not word or any(word in str(one) for one in arguments if not isinstance(one, bytes))
        calls += meant
        now = meant and calls == (1 if when == "ms" else count)
        if now and when == "ms":
            clock = threading.Timer(count / 1e3, strike)
            clock.daemon = True
            clock.start()
        elif now and when == "before":
            strike()
        elif now and when == "half":
            *first, data = arguments
            function(*first, bytes(data)[: len(data) // 2], **options)
            strike()
        result = function(*arguments, **options)
        if now and when == "after":
            strike()
        return result

    setattr(owner, name, deadly)


def kill_words(victim: int | str, site: str, when: str = "before", count: int = 1) -> list[str | Path]:
    """Return the words before `run ...` that kill there."""
    return [sys.executable, Path(__file__), str(victim), site, when, str(count)]


def tagged(folder: str) -> Iterator[tuple[int, list[str]]]:
    """Yield process id and words of every living process that carries this folder of notes."""
    tag = f"{NOTES}={folder}".encode()
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if tag in (place / "environ").read_bytes().split(b"\0"):
                words = (place / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if (place / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                    yield int(place.name), words
        except OSError:
            continue


def read_notes(folder: Path) -> tuple[list[tuple[int, int, float]], float | None, list[str]]:
    """Return what was drawn, as (sequence, place, seconds), when the kill was, and the shared memory that it leaves."""
    drawn = [one for path in folder.glob("drawn-*") for one in _whole(path.read_bytes())]
    struck = [json.loads(path.read_text()) for path in folder.glob("struck-*")]
    shared = sorted({name for one in struck for name in one["shared"]})
    return drawn, min((float(one["seconds"]) for one in struck), default=None), shared


# --- inside ---------------------------------------------------------------------------------------------------------


def _whole(data: bytes) -> Iterator[tuple[int, int, float]]:
    yield from DRAWN.iter_unpack(data[: len(data) - len(data) % DRAWN.size])


def _note_draws(folder: str) -> None:
    from bgmpi.sequence_manager import SequenceManager

    commit, file = SequenceManager.commit, os.open(f"{folder}/drawn-{os.getpid()}", os.O_WRONLY | os.O_CREAT, 0o600)

    @functools.wraps(commit)
    def noted(manager: Any, plan: Any, *more: Any) -> Any:
        active, slots, now = manager.active_set, plan.slots[plan.emits], time.time()
        named = zip(active.sequence[slots].tolist(), active.decoded(slots).tolist(), strict=True)
        os.write(file, b"".join(DRAWN.pack(sequence, place, now) for sequence, place in named))
        return commit(manager, plan, *more)

    SequenceManager.commit = noted  # type: ignore[method-assign]


def _note_strike(folder: str) -> None:
    mapped = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line]
    note = Path(folder) / f".struck-{os.getpid()}"
    note.write_text(json.dumps({"seconds": time.time(), "shared": sorted(set(mapped))}))
    os.rename(note, note.with_name(note.name[1:]))  # another rank's kill may come here


def _strike(victim: str, number: int) -> None:
    """Send the signal, and go on where that is possible."""
    folder = os.environ.get(NOTES, "")
    if folder:
        _note_strike(folder)
    if victim in _LAUNCHERS:
        words = _LAUNCHERS[victim]
        found = [pid for pid, line in tagged(folder) if any(Path(word).name in words for word in line[:2])]
        if not found:
            raise RuntimeError(f"no {victim} ({' or '.join(words)}) among the processes of {folder}")
    else:
        ranks = [pid for pid, line in tagged(folder) if __file__ in line[:2]] if victim == "all" and folder else []
        found = [*(pid for pid in ranks if pid != os.getpid()), os.getpid()]
    for pid in found:
        os.kill(pid, number)


def main() -> None:
    """Arm, then run the program."""
    from bgmpi.world import start_mpi

    start_mpi()  # before anything large is imported: see there
    victim, site, when, count = sys.argv[1:5]
    victim, _, name = victim.partition(":")
    number = signal.Signals[f"SIG{name or 'KILL'}"]
    rank = os.environ.get("PMI_RANK", os.environ.get("SLURM_PROCID", "0"))
    if os.environ.get(NOTES):
        _note_draws(os.environ[NOTES])
    if victim in ("all", rank) or (victim in _LAUNCHERS and rank == "0"):
        arm(site, when, int(count), lambda: _strike(victim, number))
    from bgmpi.cli import main as program

    sys.exit(program(sys.argv[5:]))


if __name__ == "__main__":
    main()
