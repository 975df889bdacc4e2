# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Moving pages of KV between two tiers of memory on all threads (COMBINE's restore, paper A9).

A task is a piece of one page, or several small pages, so that few large pages occupy all threads as well as many small
ones.  Bytes go through the C library's own memory copy: it knows the machine's widest way better than a loop here
could.  How a kernel is called stands in `cpu_dot_kernels`.
"""

from __future__ import annotations

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from bgmpi.errors import InternalError
from bgmpi.kernels.emit import I8, I64, pointer_to
from bgmpi.kernels.task_code import draw
from bgmpi.kernels.team import Team
from bgmpi.kernels.vector_code import at

#: Bytes that one task moves, about.
PIECE = 1 << 17


@intrinsic
def move_bytes(typing, target, source, count):
    """Copy `count` bytes; the two places do not overlap."""

    def code(context, builder, signature, args):
        byte = I8.as_pointer()
        kind = ir.FunctionType(byte, [byte, byte, I64])
        copy = cgutils.get_or_insert_function(builder.module, kind, "memcpy")
        builder.call(copy, [pointer_to(builder, args[0], I8), pointer_to(builder, args[1], I8), args[2]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), code


def copy_pages(p):
    """1 target, 2 its page step, 3 its pages int64 [k], 4 source, 5 its page step, 6 its pages int64 [k], 7 k, 8 bytes
    of a page, 9 pages a task, 10 tasks a page."""
    word = carray(p, 11, np.int64)
    count, size, together, parts = word[7], word[8], word[9], word[10]
    target_pages = carray(at(word[3]), count, np.int64)
    source_pages = carray(at(word[6]), count, np.int64)
    piece = (-(-size // parts) + 63) // 64 * 64
    while True:
        task = draw(word.ctypes.data)
        first, begin = task // parts * together, task % parts * piece
        if first >= count:
            break
        length = min(piece, size - begin)
        if length <= 0:
            continue
        for i in range(first, min(first + together, count)):
            move_bytes(
                word[1] + target_pages[i] * word[2] + begin, word[4] + source_pages[i] * word[5] + begin, length
            )


def run_copy(
    team: Team, target: torch.Tensor, target_pages: NDArray[np.int64], source: torch.Tensor,
    source_pages: NDArray[np.int64],
) -> None:  # fmt: skip
    """Copy pages (see Backend.copy_pages); raises InternalError on tensors or numbers that do not fit together."""
    _check(target, source)
    to, of = (np.ascontiguousarray(pages, np.int64) for pages in (target_pages, source_pages))
    if len(to) != len(of):
        raise InternalError(f"copy_pages: {len(of)} pages to copy to {len(to)} places")
    for name, numbers, tensor in (("target", to, target), ("source", of, source)):
        if len(numbers) and (numbers.min() < 0 or numbers.max() >= len(tensor)):
            raise InternalError(
                f"copy_pages: {name} pages {numbers.min()} to {numbers.max()}, but there are {len(tensor)}"
            )
    size = source[:1].nbytes
    if not len(to) or not size:
        return
    run = team.run if len(to) * size > PIECE else team.run_alone
    run(
        copy_pages, target.data_ptr(), target.stride(0) * target.itemsize, to.ctypes.data,
        source.data_ptr(), source.stride(0) * source.itemsize, of.ctypes.data,
        len(to), size, max(1, PIECE // size), -(-size // PIECE),
    )  # fmt: skip


def _check(target: torch.Tensor, source: torch.Tensor) -> None:
    if target.dtype != source.dtype or target.shape[1:] != source.shape[1:] or not target.dim():
        raise InternalError(
            f"copy_pages: target is {target.dtype} {tuple(target.shape)}, source is {source.dtype} "
            f"{tuple(source.shape)}; dtype and all but the first dimension must be equal"
        )
    for name, tensor in (("target", target), ("source", source)):
        if not tensor[:1].is_contiguous():
            raise InternalError(f"copy_pages: a page of {name} is not contiguous, strides {tensor.stride()}")
