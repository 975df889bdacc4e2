# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Attention of single query rows over pages, and the writing of new tokens into them.

A task is one row, one block of heads that share keys, and at most SPAN cached tokens; softmax is folded page by page.
How a kernel is called stands in `cpu_dot_kernels`.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from bgmpi.kernels.cpu_dot_kernels import many_dots
from bgmpi.kernels.cpu_row_kernels import ROWS, copy_bytes
from bgmpi.kernels.task_code import draw
from bgmpi.kernels.vector_code import at, exponential, largest, make_mix, narrow, summed, widen

mix_4 = make_mix(4)
mix_1 = make_mix(1)

#: Cached tokens that one attention task reads; fixed, so that a sequence's sums never depend on its neighbours.
SPAN = 512


def append(p):
    """Copy rows of new tokens into their pages.

    1 source, 2 token step, 3 group step, 4 pages, 5 page step, 6 group step in a page, 7 row bytes, 8 page of token
    int64 [T], 9 slot of token int64 [T], 10 T, 11 G.
    """
    word = carray(p, 12, np.int64)
    tokens = word[10]
    page = carray(at(word[8]), tokens, np.int64)
    slot = carray(at(word[9]), tokens, np.int64)
    while True:
        begin = draw(word.ctypes.data) * ROWS
        if begin >= tokens:
            break
        for t in range(begin, min(begin + ROWS, tokens)):
            for group in range(word[11]):
                place = word[4] + page[t] * word[5] + group * word[6] + slot[t] * word[7]
                copy_bytes(word[1] + t * word[2] + group * word[3], place, word[7])


@njit
def attend_page(word, row, place, count, heads, queries, score, best, total, acc, scale):
    """Let `heads` queries see `count` cached tokens, whose keys begin at `row` and values at `place`."""
    step, kind, room = word[9], word[17], score.shape[1]
    many_dots(row, step, count, queries, heads, score.ctypes.data, 4 * room, word[15], kind)
    for h in range(heads):
        scores = score.ctypes.data + 4 * h * room
        top = largest(scores, count) * scale
        if top > best[h]:
            shrink = np.float32(np.exp(best[h] - top))
            total[h] *= shrink
            for i in range(word[16]):
                acc[h, i] *= shrink
            best[h] = top
        exponential(scores, scores, count, scale, best[h])
        total[h] += summed(scores, count)
    h = 0
    while h < heads:
        share, target = score.ctypes.data + 4 * h * room, acc.ctypes.data + 4 * h * word[16]
        if heads - h >= 4:
            mix_4(place, step, count, share, 4 * room, target, 4 * word[16], word[16], kind)
            h += 4
        else:
            mix_1(place, step, count, share, 4 * room, target, 4 * word[16], word[16], kind)
            h += 1


def attend(p):
    """Attention of single query rows over at most SPAN cached tokens a task.

    1 query, 2 query token step, 3 out, 4 pages, 5 page step, 6 key group step, 7 value offset, 8 value group step,
    9 cached row step, 10 page table int32, 11 widest, 12 page_tokens, 13 tasks int64 [n, 6] (token, sequence, first and
    last + 1 cached token, head block, part or -1), 14 n, 15 key width, 16 value width, 17 kind, 18 size, 19 scale bits,
    20 heads, 21 heads of a block, 22 parts float32 [parts, heads of a block, value width + 2] (values, best, total).
    """
    word = carray(p, 23, np.int64)
    scale = np.float32(carray(p, 23, np.float64)[19])
    tasks = carray(at(word[13]), (word[14], 6), np.int64)
    page_tokens, key_width, width, block = word[12], word[15], word[16], word[21]
    query = np.empty((block, key_width), np.float32)
    queries = np.empty(block, np.int64)
    score = np.empty((block, page_tokens), np.float32)
    best, total = np.empty(block, np.float32), np.empty(block, np.float32)
    acc = np.empty((block, width), np.float32)
    for h in range(block):
        queries[h] = query.ctypes.data + 4 * h * key_width
    while True:
        number = draw(word.ctypes.data)
        if number >= word[14]:
            break
        token, sequence, begin, end = tasks[number, 0], tasks[number, 1], tasks[number, 2], tasks[number, 3]
        group, part = tasks[number, 4], tasks[number, 5]
        table = carray(at(word[10] + 4 * sequence * word[11]), word[11], np.int32)
        head = group * block
        heads = min(block, word[20] - head)
        widen(word[1] + token * word[2] + head * key_width * word[18], query.ctypes.data, heads * key_width, word[17])
        for h in range(heads):
            best[h], total[h] = -np.inf, 0
            for i in range(width):
                acc[h, i] = 0
        while begin < end:
            slot = begin % page_tokens
            count = min(page_tokens - slot, end - begin)
            page = word[4] + table[begin // page_tokens] * word[5] + slot * word[9]
            attend_page(word, page + group * word[6], page + word[7] + group * word[8], count, heads,
                        queries.ctypes.data, score, best, total, acc, scale)
            begin += count
        for h in range(heads):
            if part >= 0:
                kept = word[22] + 4 * (part * block + h) * (width + 2)
                state = carray(at(kept), width + 2, np.float32)
                for i in range(width):
                    state[i] = acc[h, i]
                state[width] = best[h]
                state[width + 1] = total[h]
            else:
                for i in range(width):
                    acc[h, i] /= total[h]
                narrow(acc.ctypes.data + 4 * h * width, word[3] + (token * word[20] + head + h) * width * word[18],
                       width, word[17])


def join_parts(p):
    """Join the parts of long sequences, in the order of their tokens.

    1 parts, 2 joins int64 [n, 4] (token, head block, first part, parts), 3 n, 4 out, 5 value width, 6 kind, 7 size,
    8 heads, 9 heads of a block.
    """
    word = carray(p, 10, np.int64)
    joins = carray(at(word[2]), (word[3], 4), np.int64)
    width, block = word[5], word[9]
    acc = np.empty(width, np.float32)
    while True:
        number = draw(word.ctypes.data)
        if number >= word[3]:
            break
        token, group, first, count = joins[number]
        parts = carray(at(word[1] + 4 * first * block * (width + 2)), (count, block, width + 2), np.float32)
        for h in range(min(block, word[8] - group * block)):
            best = np.float32(-np.inf)
            for k in range(count):
                best = max(best, parts[k, h, width])
            total = np.float32(0.0)
            acc[:] = 0
            for k in range(count):
                share = np.float32(np.exp(parts[k, h, width] - best))
                total += share * parts[k, h, width + 1]
                for i in range(width):
                    acc[i] += share * parts[k, h, i]
            for i in range(width):
                acc[i] /= total
            narrow(acc.ctypes.data, word[4] + (token * word[8] + group * block + h) * width * word[7], width, word[6])
