# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Linear layers as dot products: each weight row is read once for the tokens of a group, one after another.

A number of the result is one row times one token, summed in an order that the width alone decides, whoever shares the
call: a token's numbers do not depend on its company, on the threads, or on where its group begins.

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
from bgmpi.kernels.vector_code import make_dots, make_pair_dots, narrow, widen

dots_4x4, dots_4x1, dots_1x1 = make_dots(4, 4), make_dots(4, 1), make_dots(1, 1)
pairs_4x4, pairs_4x1, pairs_1x1 = make_pair_dots(4, 4), make_pair_dots(4, 1), make_pair_dots(1, 1)

#: Bytes of weight that one task of a small linear reads: long enough to stream, short enough to share out.
TASK_BYTES = 65536
#: Bytes of tokens that pass the weights together, so that a core's second cache holds them, and at least so many.
GROUP_BYTES, LEAST_GROUP = 1 << 19, 32


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
def many_pair_dots(row, row_step, rows, token_list, tokens, out, out_step, width):
    """The same of bfloat16 rows and tokens, by the machine's pair product."""
    whole = rows // 4 * 4
    for r in range(0, whole, 4):
        source, target = row + r * row_step, out + 4 * r
        for t in range(0, tokens - 3, 4):
            pairs_4x4(source, row_step, token_list + 8 * t, target + out_step * t, out_step, width)
        for t in range(tokens // 4 * 4, tokens):
            pairs_4x1(source, row_step, token_list + 8 * t, target + out_step * t, out_step, width)
    for r in range(whole, rows):
        for t in range(tokens):
            pairs_1x1(row + r * row_step, 0, token_list + 8 * t, out + out_step * t + 4 * r, 0, width)


@njit
def many_products(row, row_step, rows, token_list, tokens, out, out_step, width, kind, token_size):
    """The same of float32 tokens (token_size 4), or of bfloat16 rows and tokens where the machine can (2)."""
    if token_size == 2:
        many_pair_dots(row, row_step, rows, token_list, tokens, out, out_step, width)
    else:
        many_dots(row, row_step, rows, token_list, tokens, out, out_step, width, kind)


@njit
def rows_of_task(row_bytes):
    """How many weight rows one task takes, a multiple of 4."""
    return max(4, TASK_BYTES // row_bytes // 4 * 4)


@njit
def tokens_of_group(tokens, token_bytes):
    """How many tokens pass the weights together."""
    return min(max(tokens, 1), max(LEAST_GROUP, GROUP_BYTES // token_bytes // 4 * 4))


@njit
def linear_task(word, task, group, each, token_list, result, bias):
    """Multiply one group of tokens with one span of one head's weight rows."""
    tokens, heads, width, rows, kind, size = word[7], word[8], word[9], word[10], word[11], word[12]
    blocks = (rows + each - 1) // each
    first, head, begin = task // (heads * blocks) * group, task // blocks % heads, task % blocks * each
    some, count = min(group, tokens - first), min(each, rows - begin)
    for t in range(some):
        token_list[t] = word[1] + (first + t) * word[2] + head * word[3]
    many_products(word[4] + (head * rows + begin) * width * size, width * size, count, token_list.ctypes.data, some,
                  result.ctypes.data, 4 * each, width, kind, word[13])
    if word[5] != 0:
        widen(word[5] + begin * size, bias.ctypes.data, count, kind)
    for t in range(some):
        if word[5] != 0:
            for r in range(count):
                result[t, r] += bias[r]
        target = word[6] + (((first + t) * heads + head) * rows + begin) * size
        narrow(result.ctypes.data + t * 4 * each, target, count, kind)


def linear(p):
    """out[t, h] = weight[h] @ x[t, h] + bias, heads side by side; an ordinary layer has one.

    1 x, 2 token step, 3 head step, 4 weight [H, N, K], 5 bias [N] or 0, 6 out [T, H, N], 7 T, 8 H, 9 K, 10 N, 11 kind,
    12 size, 13 size of x (see `many_products`).
    """
    word = carray(p, 14, np.int64)
    tokens, heads, width, rows, size = word[7], word[8], word[9], word[10], word[12]
    group, each = tokens_of_group(tokens, word[13] * width), rows_of_task(width * size)
    tasks = (tokens + group - 1) // group * heads * ((rows + each - 1) // each)
    token_list, result = np.empty(group, np.int64), np.empty((group, each), np.float32)
    bias = np.zeros(each, np.float32)
    while True:
        task = draw(word.ctypes.data)
        if task >= tasks:
            break
        linear_task(word, task, group, each, token_list, result, bias)
