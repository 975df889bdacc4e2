# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Kernels that treat each row of numbers by itself: norm, gate and rotation.

They are bound by memory; a task takes a few rows, widened to float32, and rounds once at the end.  How a kernel is
called stands in `cpu_dot_kernels`.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from bgmpi.kernels.cpu_dot_kernels import dots_1x1
from bgmpi.kernels.task_code import draw
from bgmpi.kernels.vector_code import at, gate, narrow, widen

#: Rows that one task of a row-by-row kernel takes.
ROWS = 8


@njit
def copy_bytes(source, target, count):
    """Copy an even number of bytes."""
    read = carray(at(source), count // 2, np.uint16)
    write = carray(at(target), count // 2, np.uint16)
    for i in range(count // 2):
        write[i] = read[i]


def rms_norm(p):
    """1 x, 2 weight, 3 out, 4 rows, 5 D, 6 kind, 7 size, 8 eps bits, 9 weight kind."""
    word = carray(p, 10, np.int64)
    rows, width, kind, size = word[4], word[5], word[6], word[7]
    eps = carray(p, 10, np.float64)[8]
    values, weight = np.empty(width, np.float32), np.empty(width, np.float32)
    squares, address = np.empty(1, np.float32), np.empty(1, np.int64)
    address[0] = values.ctypes.data
    widen(word[2], weight.ctypes.data, width, word[9])
    while True:
        begin = draw(word.ctypes.data) * ROWS
        if begin >= rows:
            break
        for row in range(begin, min(begin + ROWS, rows)):
            target = word[3] + row * width * size
            widen(word[1] + row * width * size, values.ctypes.data, width, kind)
            dots_1x1(values.ctypes.data, 0, address.ctypes.data, squares.ctypes.data, 0, width, 0)
            factor = np.float32(1.0 / np.sqrt(squares[0] / width + eps))
            for i in range(width):
                values[i] *= factor
            narrow(values.ctypes.data, target, width, kind)
            widen(target, values.ctypes.data, width, kind)
            for i in range(width):
                values[i] *= weight[i]
            narrow(values.ctypes.data, target, width, kind)


def silu_mul(p):
    """1 gate_up [T, 2 * I], 2 out [T, I], 3 T, 4 I, 5 kind, 6 size."""
    word = carray(p, 7, np.int64)
    tokens, inner, kind, size = word[3], word[4], word[5], word[6]
    values = np.empty(2 * inner, np.float32)
    while True:
        begin = draw(word.ctypes.data) * ROWS
        if begin >= tokens:
            break
        for t in range(begin, min(begin + ROWS, tokens)):
            widen(word[1] + t * 2 * inner * size, values.ctypes.data, 2 * inner, kind)
            gate(values.ctypes.data, values.ctypes.data + 4 * inner, inner)
            narrow(values.ctypes.data, word[2] + t * inner * size, inner, kind)


def rotate(p):
    """1 x, 2 token step, 3 head step, 4 cos, 5 sin float32 [T, r], 6 T, 7 heads, 8 r, 9 kind."""
    word = carray(p, 10, np.int64)
    tokens, half, kind = word[6], word[8], word[9]
    cos = carray(at(word[4]), (tokens, half), np.float32)
    sin = carray(at(word[5]), (tokens, half), np.float32)
    values, turned = np.empty(2 * half, np.float32), np.empty(2 * half, np.float32)
    while True:
        begin = draw(word.ctypes.data) * ROWS
        if begin >= tokens:
            break
        for t in range(begin, min(begin + ROWS, tokens)):
            for head in range(word[7]):
                address = word[1] + t * word[2] + head * word[3]
                widen(address, values.ctypes.data, 2 * half, kind)
                for i in range(half):
                    turned[i] = values[i] * cos[t, i] - values[half + i] * sin[t, i]
                    turned[half + i] = values[half + i] * cos[t, i] + values[i] * sin[t, i]
                narrow(turned.ctypes.data, address, 2 * half, kind)
