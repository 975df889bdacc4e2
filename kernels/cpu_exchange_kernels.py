# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""What an expert exchange does to rows before and after they travel: route, pack, unpack, sum.

A row of the exchange is x, then the local expert numbers, then the weights.  How a kernel is called stands in
`cpu_dot_kernels`.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from bgmpi.kernels.cpu_row_kernels import ROWS, copy_bytes
from bgmpi.kernels.task_code import draw
from bgmpi.kernels.vector_code import at, make_mix, narrow, widen

mix_1 = make_mix(1)


def route(p):
    """Say which rank each token goes to, once a rank.  Alone.

    1 expert int32 [T, A], 2 owner int32 [experts], 3 T, 4 A, 5 R, then int64 results: 6 rows for each rank [R], 7 token
    of each row, rows ordered by rank, then token [T * A], 8 rank of each row [T * A], 9 rows of each token in rank
    order [T, A], -1 behind the last.
    """
    word = carray(p, 10, np.int64)
    tokens, active, ranks = word[3], word[4], word[5]
    expert = carray(at(word[1]), (tokens, active), np.int32)
    counts = carray(at(word[6]), ranks, np.int64)
    token = carray(at(word[7]), tokens * active, np.int64)
    rank_of = carray(at(word[8]), tokens * active, np.int64)
    rows = carray(at(word[9]), (tokens, active), np.int64)
    counts[:] = 0
    for t in range(tokens):  # rows[t] holds ranks first: distinct, ascending, -1 behind the last
        held = 0
        for a in range(active):
            if expert[t, a] < 0:
                continue
            rank = np.int64(carray(at(word[2] + 4 * expert[t, a]), 1, np.int32)[0])
            k = held
            while k > 0 and rows[t, k - 1] > rank:
                k -= 1
            if k > 0 and rows[t, k - 1] == rank:
                continue
            for j in range(held, k, -1):
                rows[t, j] = rows[t, j - 1]
            rows[t, k] = rank
            held += 1
            counts[rank] += 1
        for k in range(held, active):
            rows[t, k] = -1
    filled = np.zeros(ranks, np.int64)
    for r in range(1, ranks):
        filled[r] = filled[r - 1] + counts[r - 1]
    for t in range(tokens):
        for k in range(active):
            rank = rows[t, k]
            if rank < 0:
                break
            token[filled[rank]] = t
            rank_of[filled[rank]] = rank
            rows[t, k] = filled[rank]
            filled[rank] += 1


def pack_rows(p):
    """Fill the rows to send: x bytes, local experts int32 [A] (-1 = not there), weights float32 [A].

    1 x, 2 x row bytes, 3 expert int32 [T, A], 4 weight float32 [T, A], 5 owner, 6 local int32 [experts], 7 A, 8 token
    of each row, 9 rank of each row, 10 rows, 11 target.
    """
    word = carray(p, 12, np.int64)
    wide, active, rows = word[2], word[7], word[10]
    token = carray(at(word[8]), rows, np.int64)
    rank = carray(at(word[9]), rows, np.int64)
    each = wide + 8 * active
    while True:
        begin = draw(word.ctypes.data) * ROWS
        if begin >= rows:
            break
        for row in range(begin, min(begin + ROWS, rows)):
            target = word[11] + row * each
            copy_bytes(word[1] + token[row] * wide, target, wide)
            expert = carray(at(word[3] + 4 * active * token[row]), active, np.int32)
            there = carray(at(target + wide), active, np.int32)
            for a in range(active):
                there[a] = -1
                if expert[a] >= 0 and carray(at(word[5] + 4 * expert[a]), 1, np.int32)[0] == rank[row]:
                    there[a] = carray(at(word[6] + 4 * expert[a]), 1, np.int32)[0]
            copy_bytes(word[4] + 4 * active * token[row], target + wide + 4 * active, 4 * active)


def unpack_rows(p):
    """Take arrived rows apart: 1 rows, 2 x row bytes, 3 A, 4 number of rows, 5 x, 6 expert, 7 weight."""
    word = carray(p, 8, np.int64)
    wide, side, rows = word[2], 4 * word[3], word[4]
    while True:
        begin = draw(word.ctypes.data) * ROWS
        if begin >= rows:
            break
        for row in range(begin, min(begin + ROWS, rows)):
            source = word[1] + row * (wide + 2 * side)
            copy_bytes(source, word[5] + row * wide, wide)
            copy_bytes(source + wide, word[6] + row * side, side)
            copy_bytes(source + wide + side, word[7] + row * side, side)


def sum_parts(p):
    """Sum each token's returned rows in float32, in rank order.

    1 parts, 2 rows of each token int64 [T, A], 3 T, 4 A, 5 D, 6 kind, 7 size, 8 out.
    """
    word = carray(p, 9, np.int64)
    tokens, active, width, kind, size = word[3], word[4], word[5], word[6], word[7]
    rows = carray(at(word[2]), (tokens, active), np.int64)
    total, part = np.empty(width, np.float32), np.empty(width, np.float32)
    while True:
        begin = draw(word.ctypes.data) * ROWS
        if begin >= tokens:
            break
        for t in range(begin, min(begin + ROWS, tokens)):
            total[:] = 0
            for k in range(active):
                if rows[t, k] < 0:
                    break
                widen(word[1] + rows[t, k] * width * size, part.ctypes.data, width, kind)
                for i in range(width):
                    total[i] += part[i]
            narrow(total.ctypes.data, word[8] + t * width * size, width, kind)


def sum_pairs(p):
    """Sum each token's weighted parts in float32, in ascending expert number.

    1 parts, 2 row of each pair int64 [T, A], 3 expert int32 [T, A], -1 for none, 4 weight float32 [T, A], 5 T, 6 A,
    7 D, 8 kind, 9 size, 10 out.
    """
    word = carray(p, 11, np.int64)
    tokens, active, width, kind, size = word[5], word[6], word[7], word[8], word[9]
    rows = carray(at(word[2]), (tokens, active), np.int64)
    expert = carray(at(word[3]), (tokens, active), np.int32)
    total = np.empty(width, np.float32)
    while True:
        begin = draw(word.ctypes.data) * ROWS
        if begin >= tokens:
            break
        for t in range(begin, min(begin + ROWS, tokens)):
            total[:] = 0
            last = np.int32(-1)
            for _ in range(active):
                best = -1
                for a in range(active):
                    if expert[t, a] > last and (best < 0 or expert[t, a] < expert[t, best]):
                        best = a
                if best < 0:
                    break
                last = expert[t, best]
                mix_1(word[1] + rows[t, best] * width * size, 0, 1, word[4] + 4 * (t * active + best), 0,
                      total.ctypes.data, 0, width, kind)
            narrow(total.ctypes.data, word[10] + t * width * size, width, kind)
