"""Compiled kernels on torch's own threads.

A rank has exactly as many threads as cores, and torch's OpenMP pool is one of them per core already.  A second pool
(numba's own) would spin on the same cores and cost tenfold, so a kernel here is a plain C function that one call of
torch's OpenMP library starts on every thread of that pool; the threads then draw task numbers from one counter.
Drawing balances ragged tasks and says nothing about results: a task never adds to what another task wrote.

A kernel's argument is one row of 64-bit words: word 0 the counter, then addresses, sizes, and floats as their bits.
Kernels compile at first use and are kept on disk by numba, so a second start compiles nothing.  Numba takes what it
kept for fresh as long as the kernel's own file is unchanged, but a kernel is made of code from several files of this
folder; so each is kept under a name that carries a hash of all of them, and an edit anywhere here compiles anew.
Rejected: numba's parallel loops (a second OpenMP library next to torch's, five times the compile time).
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import FunctionType
from typing import cast

import torch
from numba import cfunc, types

from bgmpi.errors import InternalError

KernelBody = Callable[[int], None]
_SIGNATURE = types.void(types.voidptr)


@lru_cache(maxsize=256)
def bits(number: float) -> int:
    """Return the bits of a float64 as a word."""
    return int(struct.unpack("q", struct.pack("d", number))[0])


@lru_cache(maxsize=1)
def source_stamp(folder: Path) -> str:
    """Return a hash of all sources in this folder, read once."""
    sources = sorted(folder.glob("*.py"))
    return hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()[:12]


def stamped(body: KernelBody, folder: Path) -> KernelBody:
    """Return `body` under a name that changes with the sources of this folder; numba names its file on disk by it."""
    function = cast(FunctionType, body)
    copy = FunctionType(function.__code__, function.__globals__, function.__name__)
    copy.__module__, copy.__doc__ = function.__module__, function.__doc__
    copy.__qualname__ = f"{function.__qualname__}.{source_stamp(folder)}"
    return copy


def _openmp() -> ctypes.CDLL:
    """Find the OpenMP library that torch itself runs on (a GNU, Intel or LLVM one: all know GOMP_parallel)."""
    beside_torch = sorted(str(path) for path in (Path(torch.__file__).parent / "lib").glob("lib*omp*"))
    for name in [*beside_torch, "libgomp.so.1"]:
        try:
            library = ctypes.CDLL(name)
            entry = library.GOMP_parallel
        except (OSError, AttributeError):
            continue
        entry.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        entry.restype = None
        return library
    raise InternalError(
        "no OpenMP library with GOMP_parallel was found beside torch, so compiled kernels cannot share its threads; "
        "run with one thread a rank, or install torch from a wheel that carries its OpenMP library"
    )


class Team:
    """The threads of this rank, and the kernels compiled so far.  Not to be shared by Python threads."""

    WORDS = 32

    def __init__(self, threads: int) -> None:
        library = _openmp() if threads > 1 else None
        self.threads = threads
        self._parallel = library.GOMP_parallel if library is not None else None
        self._words = bytearray(8 * self.WORDS)
        self._held = (ctypes.c_int64 * self.WORDS).from_buffer(self._words)
        self._address = ctypes.addressof(self._held)
        self._pack = [struct.Struct(f"{count}q").pack_into for count in range(self.WORDS + 1)]
        self._compiled: dict[KernelBody, tuple[int, Callable[[int], None]]] = {}

    def run(self, body: KernelBody, *words: int) -> None:
        """Run `body` on every thread; returns when all are through."""
        address, call = self._compiled.get(body) or self._compile(body)
        self._pack[len(words)](self._words, 8, *words)
        self._words[:8] = bytes(8)
        if self._parallel is None:
            call(self._address)
        else:
            self._parallel(address, self._address, self.threads, 0)

    def run_alone(self, body: KernelBody, *words: int) -> None:
        """Run `body` on this thread only: for work too small to be worth waking the others."""
        _, call = self._compiled.get(body) or self._compile(body)
        self._pack[len(words)](self._words, 8, *words)
        self._words[:8] = bytes(8)
        call(self._address)

    def _compile(self, body: KernelBody) -> tuple[int, Callable[[int], None]]:
        compiled = cfunc(_SIGNATURE, cache=True)(stamped(body, Path(__file__).parent))
        address = int(compiled.address)
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
        self._compiled[body] = address, call
        return address, call
