"""What the members of a group tell one another while they compute one model together (PARTITION, paper section 5).

A weight's output rows are split over the group, so each member holds some columns of every result; all of them are
gathered on every member.  No sum is split, hence each number is the one that a single rank would have computed.

A step has one token nearly always, and some hundred such gathers: with one token the members' columns, one behind the
other, already are the whole row, so the bytes go from the part to the result and nothing is copied.  Knows addresses
and widths; refuses to know what a column means.  Rejected: adding partial products, whose order of sums would depend
on the size of the group.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from bgmpi.errors import InternalError
from bgmpi.kernels.backend import Group


@lru_cache(maxsize=1024)
def byte_counts(widths: tuple[int, ...], bytes_of_column: int) -> NDArray[np.int64]:
    """Return what each member sends, int64 [members], not to be written to."""
    counts = np.array(widths, np.int64) * bytes_of_column
    counts.flags.writeable = False
    return counts


@lru_cache(maxsize=1024)
def _array(size: int) -> type[ctypes.Array[ctypes.c_uint8]]:
    return ctypes.c_uint8 * size


def bytes_of(rows: torch.Tensor) -> NDArray[np.uint8]:
    """Return the bytes of a contiguous tensor, in place; they are there as long as the caller holds the tensor.

    By the address: a quarter of the time of a tensor's own view, and a step asks some two hundred times.
    """
    size = rows.nbytes
    if not size:
        return np.empty(0, np.uint8)
    return np.frombuffer(memoryview(_array(size).from_address(rows.data_ptr())), np.uint8)


def gather_columns(part: torch.Tensor, group: Group, widths: tuple[int, ...]) -> torch.Tensor:
    """Collective over the group (see Backend.gather_columns)."""
    tokens, width = part.shape
    if len(widths) != group.size or width != widths[group.rank]:
        raise InternalError(
            f"gather_columns: member {group.rank} of {group.size} brings {width} columns, the widths are {widths}; "
            "every member must name all members' widths, its own included"
        )
    result = torch.empty(tokens, sum(widths), dtype=part.dtype)
    if tokens == 0:
        return result
    arrived = result if tokens == 1 else torch.empty(result.numel(), dtype=part.dtype)
    part = part.contiguous()  # under a name: only its bytes are handed on
    group.all_gather_bytes(
        bytes_of(part), byte_counts(widths, tokens * part.element_size()), bytes_of(arrived)
    )
    if tokens > 1:
        pieces = arrived.split([tokens * each for each in widths])
        for piece, columns, each in zip(pieces, result.split(list(widths), 1), widths, strict=True):
            columns.copy_(piece.view(tokens, each))
    return result


def spread(rows: torch.Tensor, group: Group, root: int) -> None:
    """Collective over the group (see Backend.spread)."""
    if not rows.is_contiguous():
        raise InternalError(f"spread: rows {tuple(rows.shape)} have strides {rows.stride()}; they must be contiguous")
    if rows.numel():
        group.broadcast_bytes(bytes_of(rows), root)
