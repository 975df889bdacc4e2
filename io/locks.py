"""Says who holds a file that is to be replaced: HDF5 locks a file that it has open for writing.

Replacing a file under another program's feet harms neither, for the name alone changes hands, but what that program
goes on to write is then in no file that anybody finds.  So it is told before the work begins.  Where a file system has
no locks nothing can be known; HDF5_USE_FILE_LOCKING=FALSE, which turns HDF5's own off, turns this off too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from fcntl import LOCK_NB, LOCK_SH, flock
from pathlib import Path

SWITCH = "HDF5_USE_FILE_LOCKING"
_OFF = ("FALSE", "0", "OFF", "NO")


def held_by(path: Path, environ: Mapping[str, str]) -> str | None:
    """Return in words who has `path` locked for writing; None when nobody has, or nothing can be told."""
    if environ.get(SWITCH, "").upper() in _OFF or not path.is_file():
        return None
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        flock(handle, LOCK_SH | LOCK_NB)
    except BlockingIOError:
        return _holder(os.fstat(handle)) or "another process (perhaps of another node)"
    except OSError:
        return None
    finally:
        os.close(handle)
    return None


def _holder(held: os.stat_result) -> str | None:
    """Return the process that the kernel names as the holder, where it is one of this machine."""
    place = f"{os.major(held.st_dev):02x}:{os.minor(held.st_dev):02x}:{held.st_ino}"
    with suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if place in words and "WRITE" in words:
                pid = words[words.index(place) - 1]
                if int(pid) > 0:
                    return f"process {pid} ({_name(pid)})"
    return None


def _name(pid: str) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return "ended since"
