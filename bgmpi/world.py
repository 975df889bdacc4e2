"""The one door to MPI (design laws 1 and 2).

Control crosses ranks in whole rounds: one gather, one scatter, and small agreements.  Records travel as MessagePack of
typed data (never pickle), numpy arrays as dtype + bytes.  Bulk bytes of the expert exchange go through
`all_to_all_bytes`; this object is the `Collective` of the device seam.

Errors between collectives are agreed on first and then raised everywhere (`agree`); an error that cannot be agreed on
(in the middle of a step) ends all ranks through `abort`.  Rejected: letting a rank raise alone, which leaves the others
waiting until the wall-time limit.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from bgmpi.errors import BgmpiError, ExitCode
from bgmpi.group import Group
from bgmpi.launcher import check_launch
from bgmpi.pulse import Pulse
from bgmpi.stop_request import StopRequest

T = TypeVar("T")

# Under `srun` an abort ends every task by SIGKILL and the exit code is lost; slurm/run_batch.sh reads it from here.
CODE_FILE = "RUN_CODE_FILE"

def _to_wire(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [value.dtype.str, list(value.shape), value.tobytes()]
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, np.floating):
        return float(value)
    raise NotImplementedError(f"{type(value).__name__} cannot cross ranks")


def _from_wire(kind: type, value: Any) -> Any:
    if getattr(kind, "__origin__", kind) is np.ndarray:
        dtype, shape, data = value
        return np.frombuffer(bytearray(data), dtype=np.dtype(dtype)).reshape(shape)
    raise NotImplementedError(f"{kind} cannot cross ranks")


def encode(value: Any) -> bytes:
    """Return typed plain data (dataclasses, containers, numpy arrays) as MessagePack."""
    return msgspec.msgpack.encode(value, enc_hook=_to_wire)


def decode(data: bytes, kind: type[T]) -> T:
    """Return MessagePack as `kind`; raises msgspec.ValidationError when it is something else."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_from_wire)


class World:
    """All ranks of the job.  Opened once by `open_world`, closed by `with`.

    node_of: int64 [ranks], the first rank of each rank's node; node_rank, node_size: this rank's place on its node;
    pulse: how this rank goes on, which also says when it waits here; stop: whether somebody asked this rank to stop.
    """

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi = mpi
        self._comm = comm
        self.pulse = Pulse()
        self.stop = StopRequest()
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.host = socket.gethostname().split(".")[0]
        node = comm.Split_type(mpi.COMM_TYPE_SHARED, key=self.rank)
        self.node_rank: int = node.Get_rank()
        self.node_size: int = node.Get_size()
        first = np.array([self.rank], np.int64)
        node.Bcast(first, root=0)
        node.Free()
        self.node_of: NDArray[np.int64] = self.all_gather_counts(first)[:, 0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None and not (isinstance(error, BgmpiError) and error.agreed) and self.size > 1:
            self.abort(error)

    # --- control: whole rounds ------------------------------------------------------------------------------------

    def gather(self, value: Any) -> list[bytes] | None:
        """Collective over the world.  Rank 0 gets everybody's encoded value, in rank order; others None."""
        data = np.frombuffer(encode(value), np.uint8)
        if self.size == 1:
            return [data.tobytes()]
        sizes = np.empty(self.size, np.int64) if self.rank == 0 else None
        with self.pulse.waiting:
            self._comm.Gather(np.array([len(data)], np.int64), sizes, root=0)
            if sizes is None:
                self._comm.Gatherv(data, None, root=0)
                return None
            everything = np.empty(int(sizes.sum()), np.uint8)
            self._comm.Gatherv(data, [everything, sizes], root=0)
        ends = np.cumsum(sizes)
        return [everything[end - size : end].tobytes() for end, size in zip(ends, sizes, strict=True)]

    def scatter(self, values: list[Any] | None, kind: type[T]) -> T:
        """Collective over the world.  Rank 0 gives one value a rank (others None); -> this rank's value."""
        pieces = [encode(value) for value in values] if values is not None else None
        if self.size == 1:
            assert pieces is not None
            return decode(pieces[0], kind)
        size = np.empty(1, np.int64)
        sizes = np.array([len(piece) for piece in pieces], np.int64) if pieces is not None else None
        joined = [np.frombuffer(b"".join(pieces), np.uint8), sizes] if pieces is not None else None
        with self.pulse.waiting:
            self._comm.Scatter(sizes, size, root=0)
            mine = np.empty(int(size[0]), np.uint8)
            self._comm.Scatterv(joined, mine, root=0)
        return decode(mine.tobytes(), kind)

    def broadcast(self, value: T | None, kind: type[T]) -> T:
        """Collective over the world.  Rank 0's value reaches every rank."""
        return self.scatter([value] * self.size if self.rank == 0 else None, kind)

    def agree(self, error: BgmpiError | None) -> None:
        """Collective over the world.  Raise the first failing rank's error on every rank, or return on every rank."""
        if self.size == 1:
            if error is not None:
                raise error
            return
        code = np.array([int(error.exit_code) if error is not None else 0], np.int64)
        codes = np.empty(self.size, np.int64)
        with self.pulse.waiting:
            self._comm.Allgather(code, codes)
        if not codes.any():
            return
        first = int(np.flatnonzero(codes)[0])
        message = f"rank {first}/{self.host}: {error}" if error is not None and first else str(error or "")
        text = message.encode()
        size = np.array([len(text)], np.int64)
        self._comm.Bcast(size, root=first)
        buffer = np.frombuffer(text, np.uint8).copy() if first == self.rank else np.empty(int(size[0]), np.uint8)
        self._comm.Bcast(buffer, root=first)
        agreed = BgmpiError(buffer.tobytes().decode())
        agreed.exit_code = ExitCode(int(codes[first]))
        agreed.agreed = True
        raise agreed

    def exchange(self, pieces: list[bytes]) -> list[bytes]:
        """Collective over the world.  pieces[r] goes to rank r -> what each rank had for me, in rank order."""
        if self.size == 1:
            return pieces
        counts = np.array([len(piece) for piece in pieces], np.int64)
        incoming = self.all_to_all_counts(counts)
        received = np.empty(int(incoming.sum()), np.uint8)
        self.all_to_all_bytes(np.frombuffer(b"".join(pieces), np.uint8), counts, received, incoming)
        ends = np.cumsum(incoming)
        return [received[end - size : end].tobytes() for end, size in zip(ends, incoming, strict=True)]

    def all_gather_counts(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Collective over the world.  counts int64 [k] -> int64 [ranks, k]."""
        if self.size == 1:
            return counts[None]
        everyone = np.empty((self.size, len(counts)), np.int64)
        with self.pulse.waiting:
            self._comm.Allgather(counts, everyone)
        return everyone

    def barrier(self) -> None:
        """Collective over the world."""
        with self.pulse.waiting:
            self._comm.Barrier()

    # --- bulk: the expert exchange --------------------------------------------------------------------------------

    def all_to_all_counts(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Collective over the world.  counts int64 [ranks] -> what each rank counts for me, int64 [ranks]."""
        received = np.empty_like(counts)
        with self.pulse.waiting:
            self._comm.Alltoall(counts, received)
        return received

    def all_to_all_bytes(
        self,
        send: NDArray[np.uint8],
        send_counts: NDArray[np.int64],
        receive: NDArray[np.uint8],
        receive_counts: NDArray[np.int64],
    ) -> None:
        """Collective over the world.  Flat byte buffers; counts int64 [ranks] in bytes, pieces in rank order."""
        with self.pulse.waiting:
            self._comm.Alltoallv([send, send_counts], [receive, receive_counts])

    # --- one-sided windows and groups -----------------------------------------------------------------------------

    def allocate(self, size: int) -> Any:
        """Collective over the world.  -> an mpi4py window over `size` bytes of each rank (sizes may differ), inside the
        one epoch in which it stays until it is freed; `bgmpi.io.windows` makes use of it.

        Memory that MPI allocates: 5 to 20 times faster than a window over memory that is already there, and shared
        between the ranks of a node.  One epoch for good, because a fresh lock waits for the target to enter MPI.
        """
        with self.pulse.waiting:
            window = self._mpi.Win.Allocate(size, 1, self._mpi.INFO_NULL, self._comm)
            window.Lock_all(self._mpi.MODE_NOCHECK)
        return window

    def groups(self) -> dict[tuple[int, int], Group]:
        """Collective over the world.  -> this rank's groups by (first, size): the whole world, and of the sizes 2, 4,
        8, .. the one that the rank is in, [k * size, (k + 1) * size), unless the world ends inside it."""
        groups = {(0, self.size): Group(self._comm.Dup(), 0, self.pulse)}
        size = 2
        while size < self.size:
            first = self.rank // size * size
            full = first + size <= self.size
            comm = self._comm.Split(first if full else self._mpi.UNDEFINED, self.rank)
            if full:
                groups[first, size] = Group(comm, first, self.pulse)
            size *= 2
        return groups

    def abort(self, error: BaseException) -> None:
        """End every rank now, printing this rank's traceback first.  Local, never returns with more than one rank."""
        code = error.exit_code if isinstance(error, BgmpiError) else ExitCode.INTERNAL
        lines = traceback.format_exception(error) if code == ExitCode.INTERNAL else [f"{error}\n"]
        try:
            sys.stderr.write("".join(f"rank {self.rank}/{self.host}: {part}" for part in lines))
            sys.stderr.flush()
            note_exit_code(code)
        finally:  # a closed pipe or a full disk must not keep this rank from ending the others
            self._comm.Abort(int(code))


def note_exit_code(code: ExitCode) -> None:
    """Write the job's exit code where the batch script reads it; the first failing rank's stays."""
    if path := os.environ.get(CODE_FILE):
        with suppress(FileExistsError), open(path, "x", encoding="ascii") as file:
            file.write(str(int(code)))


def start_mpi() -> None:
    """Collective over all processes of the launch: start MPI, while the process is still small.

    Under Slurm's pmi2 MPICH publishes a rank's address with whatever lies behind it in memory, packed; Slurm cuts what
    does not fit into 1,024 letters, and the launch dies.  Behind it are zeros as long as nothing large was imported.
    """
    import_module("mpi4py.MPI")


@contextmanager
def starting(limit: float) -> Iterator[None]:
    """Let this process print its stack and leave when `limit` seconds pass (0: never) before `started` is called or the
    block ends.  Local.

    MPI starts inside an import that holds the interpreter, so no thread of Python could watch it.
    """
    if limit:
        faulthandler.dump_traceback_later(limit, exit=True)
    try:
        yield
    finally:
        started()


def started() -> None:
    """Say that others watch this process now (see `starting`).  Local."""
    faulthandler.cancel_dump_traceback_later()


def open_world(*, allow_mismatch: bool = False) -> World:
    """Collective over all processes of the launch: start MPI and join the world.

    Raises UsageError when launcher and MPI disagree about the number of ranks.
    """
    from mpi4py import MPI

    check_launch(MPI.COMM_WORLD.Get_size(), os.environ, allow_mismatch=allow_mismatch)
    return World(MPI, MPI.COMM_WORLD.Dup())
