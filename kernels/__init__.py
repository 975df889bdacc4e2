"""The device of this rank, behind one seam (`backend.py`).

`open_backend` is the only place that knows which devices exist; everything above asks the `Backend` it returns and
never learns its kind.  Opening also settles the threads of the process, because a rank has exactly one backend and
every library below it (matrix kernels, compiled kernels) must share the same cores: one thread too many costs tenfold.
"""

from __future__ import annotations

from bgmpi.errors import UsageError
from bgmpi.kernels.backend import Backend, Collective


def open_backend(
    name: str, collective: Collective | None, threads: int, deterministic: bool = False
) -> Backend:
    """Open the device `name` for this rank and let it use `threads` CPU threads.

    `collective` moves bytes between the expert ranks; None means that this rank owns all experts.  deterministic: see
    `Backend.deterministic`.
    Raises UsageError for an unknown device or fewer than one thread.
    """
    if threads < 1:
        raise UsageError(f"threads={threads}: a rank needs at least 1 thread; pass --threads 1 or more")
    match name:
        case "cpu":
            from bgmpi.kernels.cpu import CpuBackend

            return CpuBackend(collective, threads, deterministic=deterministic)
        case _:
            raise UsageError(f"device '{name}' is not known; expected one of: cpu")
