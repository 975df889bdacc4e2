# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Experts as dot products, and the bookkeeping that every way of computing experts shares.

Pairs (token, expert) are sorted by expert, so each expert's weights are read once; the parts of a token are summed in
ascending expert order in float32, whoever computed them.  How a kernel is called stands in `cpu_dot_kernels`.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from bgmpi.kernels.cpu_dot_kernels import many_products, rows_of_task, tokens_of_group
from bgmpi.kernels.cpu_row_kernels import ROWS
from bgmpi.kernels.task_code import draw
from bgmpi.kernels.vector_code import at, gate, make_mix, narrow

mix_1 = make_mix(1)


@njit
def sort_by_expert(expert, experts, first, busy, token, place, column):
    """Sort the pairs of expert int32 [T, A]; see `sort_pairs` for what is filled."""
    tokens, active = expert.shape
    first[:] = 0
    for t in range(tokens):
        for a in range(active):
            if expert[t, a] >= experts:
                busy[0] = -1
                return
            if expert[t, a] >= 0:
                first[expert[t, a] + 1] += 1
    busy[0] = 0
    for e in range(experts):
        if first[e + 1] > 0:
            busy[0] += 1
            busy[busy[0]] = e
        first[e + 1] += first[e]
    filled = first[:experts].copy()
    for t in range(tokens):
        held = 0
        for a in range(active):
            e = expert[t, a]
            if e < 0:
                continue
            pair = filled[e]
            filled[e] += 1
            token[pair] = t
            k = held
            while k > 0 and place[t, k - 1] > pair:
                place[t, k] = place[t, k - 1]
                column[t, k] = column[t, k - 1]
                k -= 1
            place[t, k] = pair
            column[t, k] = a
            held += 1
        for k in range(held, active):
            place[t, k] = -1
            column[t, k] = 0


def sort_pairs(p):
    """Sort (token, expert) pairs by expert, then token.  Alone.

    1 expert int32 [T, A], 2 T, 3 A, 4 E, then int64 results: 5 first pair of each expert [E + 1], 6 number of active
    experts (-1: an expert's number was not below E) and their list [1 + E], 7 token of each pair [pairs], 8 place
    [T, A] (the token's pairs in ascending expert order, -1 behind the last), 9 column [T, A] (which of the token's A
    experts that is).
    """
    word = carray(p, 10, np.int64)
    tokens, active, experts = word[2], word[3], word[4]
    sort_by_expert(
        carray(at(word[1]), (tokens, active), np.int32), experts, carray(at(word[5]), experts + 1, np.int64),
        carray(at(word[6]), experts + 1, np.int64), carray(at(word[7]), tokens * active, np.int64),
        carray(at(word[8]), (tokens, active), np.int64), carray(at(word[9]), (tokens, active), np.int64),
    )


@njit
def up_task(word, task, group, each, token_list, result):
    """Run one span of gate and up rows over all pairs of one expert, group by group."""
    width, inner, kind, size = word[7], word[8], word[9], word[10]
    blocks = (inner + each - 1) // each
    e = carray(at(word[4] + 8 + 8 * (task // blocks)), 1, np.int64)[0]
    begin = task % blocks * each
    span = carray(at(word[3] + 8 * e), 2, np.int64)
    count, token = min(each, inner - begin), carray(at(word[5]), span[1], np.int64)
    weight = carray(at(word[6] + 8 * e), 1, np.int64)[0] + begin * width * size
    for first in range(span[0], span[1], group):
        some = min(group, span[1] - first)
        for t in range(some):
            token_list[t] = word[1] + token[first + t] * word[2]
        for half in range(2):
            many_products(weight + half * inner * width * size, width * size, count, token_list.ctypes.data, some,
                          result.ctypes.data + half * 4 * each, 8 * each, width, kind, word[15])
        for t in range(some):
            row = result.ctypes.data + t * 8 * each
            gate(row, row + 4 * each, count)
            narrow(row, word[11] + ((first + t) * inner + begin) * word[14], count, word[13])


def experts_up(p):
    """hidden = silu(gate) * up of every pair.

    1 x, 2 x step, 3 first, 4 active experts, 5 token of pair, 6 weights int64 [E], 7 D, 8 I, 9 kind, 10 size, 11 hidden
    [pairs, I], 12 most pairs of one expert, 13 hidden kind, 14 hidden size, 15 size of x (see `many_products`).
    """
    word = carray(p, 16, np.int64)
    width, inner, size = word[7], word[8], word[10]
    each, group = rows_of_task(2 * width * size), tokens_of_group(word[12], word[15] * width)
    tasks = carray(at(word[4]), 1, np.int64)[0] * ((inner + each - 1) // each)
    token_list, result = np.empty(group, np.int64), np.empty((group, 2 * each), np.float32)
    while True:
        task = draw(word.ctypes.data)
        if task >= tasks:
            break
        up_task(word, task, group, each, token_list, result)


@njit
def down_task(word, task, group, each, token_list, result):
    """Run one span of down rows over all pairs of one expert, group by group."""
    inner, width, kind, size, step = word[5], word[6], word[7], word[8], word[5] * word[11]
    blocks = (width + each - 1) // each
    e = carray(at(word[3] + 8 + 8 * (task // blocks)), 1, np.int64)[0]
    begin = task % blocks * each
    span, count = carray(at(word[2] + 8 * e), 2, np.int64), min(each, width - begin)
    weight = carray(at(word[4] + 8 * e), 1, np.int64)[0] + begin * inner * size
    for first in range(span[0], span[1], group):
        some = min(group, span[1] - first)
        for t in range(some):
            token_list[t] = word[1] + (first + t) * step
        many_products(weight, inner * size, count, token_list.ctypes.data, some, result.ctypes.data, 4 * each, inner,
                      kind, word[11])
        for t in range(some):
            target = word[9] + ((first + t) * width + begin) * word[13]
            narrow(result.ctypes.data + t * 4 * each, target, count, word[12])


def experts_down(p):
    """y of every pair.

    1 hidden [pairs, I], 2 first, 3 active experts, 4 weights int64 [E], 5 I, 6 D, 7 kind, 8 size, 9 y [pairs, D],
    10 most pairs of one expert, 11 hidden size (see `many_products`), 12 y kind, 13 y size.
    """
    word = carray(p, 14, np.int64)
    inner, width, size = word[5], word[6], word[8]
    each, group = rows_of_task(inner * size), tokens_of_group(word[10], word[11] * inner)
    tasks = carray(at(word[3]), 1, np.int64)[0] * ((width + each - 1) // each)
    token_list, result = np.empty(group, np.int64), np.empty((group, each), np.float32)
    while True:
        task = draw(word.ctypes.data)
        if task >= tasks:
            break
        down_task(word, task, group, each, token_list, result)


def combine(p):
    """Sum each token's weighted expert rows in float32, ascending expert order.

    1 expert int32 [T, A], 2 weight float32 [T, A], 3 first, 4 place, 5 column, 6 y int64 [E] (address of each expert's
    rows), 7 y kind, 8 y size, 9 out, 10 T, 11 A, 12 D, 13 out kind, 14 out size.
    """
    word = carray(p, 15, np.int64)
    tokens, active, width = word[10], word[11], word[12]
    expert = carray(at(word[1]), (tokens, active), np.int32)
    place = carray(at(word[4]), (tokens, active), np.int64)
    column = carray(at(word[5]), (tokens, active), np.int64)
    total = np.empty(width, np.float32)
    while True:
        begin = draw(word.ctypes.data) * ROWS
        if begin >= tokens:
            break
        for t in range(begin, min(begin + ROWS, tokens)):
            total[:] = 0
            for k in range(active):
                if place[t, k] < 0:
                    break
                e = expert[t, column[t, k]]
                first = carray(at(word[3] + 8 * e), 1, np.int64)[0]
                row = carray(at(word[6] + 8 * e), 1, np.int64)[0] + (place[t, k] - first) * width * word[8]
                share = word[2] + 4 * (t * active + column[t, k])
                mix_1(row, 0, 1, share, 0, total.ctypes.data, 0, width, word[7])
            narrow(total.ctypes.data, word[9] + t * width * word[14], width, word[13])
