# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Linear layers of few tokens as dot products: each weight row is read once for all tokens of the call.

How every kernel of the CPU is written (`cpu_*_kernels.py`), told here once: a kernel is a plain C function that every
thread of a `Team` runs.  It reads its words, draws task numbers until they run out, and writes only what its task owns,
so its result depends neither on the number of threads nor on who drew what.  Sums run in an order fixed by the row's
own width or the sequence's own length (law 7).  Kernels know addresses and sizes; `cpu.py` knows tensors.

Word 0 is the task counter; each docstring names the other words in order.  Addresses and steps are in bytes; `kind` is
a number format of `emit`, `size` its bytes.  Every kernel handles zero tasks and any width.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from bgmpi.kernels.task_code import draw
from bgmpi.kernels.vector_code import make_dots, narrow, widen

dots_4x4 = make_dots(4, 4)
dots_4x1 = make_dots(4, 1)
dots_1x1 = make_dots(1, 1)

#: Bytes of weight that one task of a small linear reads: long enough to stream, short enough to share out.
TASK_BYTES = 65536


@njit
def many_dots(row, row_step, rows, token_list, tokens, out, out_step, width, kind):
    """out[t, r] = row r . token t for any number of rows and tokens; each value is the same in any company."""
    whole = rows // 4 * 4
    for r in range(0, whole, 4):
        source, target = row + r * row_step, out + 4 * r
        for t in range(0, tokens - 3, 4):
            dots_4x4(source, row_step, token_list + 8 * t, target + out_step * t, out_step, width, kind)
        for t in range(tokens // 4 * 4, tokens):
            dots_4x1(source, row_step, token_list + 8 * t, target + out_step * t, out_step, width, kind)
    for r in range(whole, rows):
        for t in range(tokens):
            dots_1x1(row + r * row_step, 0, token_list + 8 * t, out + out_step * t + 4 * r, 0, width, kind)


@njit
def rows_of_task(row_bytes):
    """How many weight rows one task takes, a multiple of 4."""
    return max(4, TASK_BYTES // row_bytes // 4 * 4)


def linear(p):
    """1 x float32, 2 x step, 3 weight, 4 bias or 0, 5 out, 6 T, 7 K, 8 N, 9 kind, 10 size."""
    word = carray(p, 11, np.int64)
    tokens, width, rows, kind, size = word[6], word[7], word[8], word[9], word[10]
    each = rows_of_task(width * size)
    token_list = np.empty(tokens, np.int64)
    for t in range(tokens):
        token_list[t] = word[1] + t * word[2]
    result = np.empty((tokens, each), np.float32)
    bias = np.zeros(each, np.float32)
    while True:
        begin = draw(word.ctypes.data) * each
        if begin >= rows:
            break
        count = min(each, rows - begin)
        many_dots(word[3] + begin * width * size, width * size, count, token_list.ctypes.data, tokens,
                  result.ctypes.data, 4 * each, width, kind)
        if word[4] != 0:
            widen(word[4] + begin * size, bias.ctypes.data, count, kind)
            for t in range(tokens):
                for r in range(count):
                    result[t, r] += bias[r]
        for t in range(tokens):
            narrow(result.ctypes.data + t * 4 * each, word[5] + (t * rows + begin) * size, count, kind)
