# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Attention of query rows over pages, and the writing of new tokens into them.

A task is a few neighbouring rows of one sequence, one block of heads that share keys, and at most SPAN cached tokens.
Softmax is folded every FOLD tokens, counted from the sequence's begin.  So what a row gets depends on its own place and
on the window: not on rows that share its task, on chunks, on page size or on threads.
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
#: Cached tokens between two folds of the softmax.
FOLD = 64


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
def place_of(word, sequence, token):
    """Where a cached token of a sequence lies, and how many of its page stand from there on."""
    slot = token % word[12]
    page = carray(at(word[10] + 4 * (sequence * word[11] + token // word[12])), 1, np.int32)[0]
    return word[4] + page * word[5] + slot * word[9], word[12] - slot


@njit
def score_fold(word, sequence, group, begin, end, queries, score):
    """score[q, j] = query q . key of cached token begin + j, for all queries."""
    token = begin
    while token < end:
        place, left = place_of(word, sequence, token)
        count = min(left, end - token)
        many_dots(place + group * word[6], word[9], count, queries.ctypes.data, len(queries),
                  score.ctypes.data + 4 * (token - begin), 4 * FOLD, word[15], word[17])
        token += count


@njit
def weigh_fold(scores, count, scale, q, best, total, acc):
    """Turn query q's scores of `count` tokens into shares, and shrink what it gathered before."""
    top = largest(scores, count) * scale
    if top > best[q]:
        shrink = np.float32(np.exp(best[q] - top))
        total[q] *= shrink
        for i in range(acc.shape[1]):
            acc[q, i] *= shrink
        best[q] = top
    exponential(scores, scores, count, scale, best[q])
    total[q] += summed(scores, count)


@njit
def mix_fold(word, sequence, group, begin, end, score, first, queries, acc):
    """Add the values of cached tokens begin .. end - 1 to queries first .. first + queries - 1; their shares begin at
    address score."""
    width, token = word[16], begin
    while token < end:
        place, left = place_of(word, sequence, token)
        count = min(left, end - token)
        place += word[7] + group * word[8]
        q = 0
        while q < queries:
            share = score + 4 * (q * FOLD + token - begin)
            target = acc.ctypes.data + 4 * (first + q) * width
            if queries - q >= 4:
                mix_4(place, word[9], count, share, 4 * FOLD, target, 4 * width, width, word[17])
                q += 4
            else:
                mix_1(place, word[9], count, share, 4 * FOLD, target, 4 * width, width, word[17])
                q += 1
        token += count


@njit
def attend_fold(word, task, heads, begin, end, queries, score, best, total, acc, scale):
    """Let the rows of a task see what they may of cached tokens begin .. end - 1, which lie within one fold."""
    sequence, group, rows, seen, window = task[1], task[4], task[6], task[7], word[23]
    score_fold(word, sequence, group, begin, end, queries[: rows * heads], score)
    low = max(begin, seen + rows - 1 - window) if window > 0 else begin
    if low == begin and end <= seen:  # all rows see all
        for q in range(rows * heads):
            weigh_fold(score.ctypes.data + 4 * q * FOLD, end - begin, scale, q, best, total, acc)
        mix_fold(word, sequence, group, begin, end, score.ctypes.data, 0, rows * heads, acc)
        return
    for row in range(rows):
        low = max(begin, seen + row - window) if window > 0 else begin
        high, first = min(end, seen + row), row * heads
        if low >= high:
            continue
        scores = score.ctypes.data + 4 * (first * FOLD + low - begin)
        for h in range(heads):
            weigh_fold(scores + 4 * h * FOLD, high - low, scale, first + h, best, total, acc)
        mix_fold(word, sequence, group, low, high, scores, first, heads, acc)


@njit
def keep_row(word, task, row, heads, best, total, acc):
    """Write what one row of a task got, or the part of it that `join_parts` will join."""
    width, block, size, first = word[16], word[21], word[18], row * heads
    head = task[4] * block
    for h in range(heads):
        if task[5] >= 0:
            part = task[5] + row * task[8]
            state = carray(at(word[22] + 4 * (part * block + h) * (width + 2)), width + 2, np.float32)
            for i in range(width):
                state[i] = acc[first + h, i]
            state[width], state[width + 1] = best[first + h], total[first + h]
        else:
            for i in range(width):
                acc[first + h, i] /= total[first + h]
            target = word[3] + ((task[0] + row) * word[20] + head + h) * width * size
            narrow(acc.ctypes.data + 4 * (first + h) * width, target, width, word[17])


def attend(p):
    """Attention of neighbouring query rows over at most SPAN cached tokens a task.

    1 query, 2 query token step, 3 out, 4 pages, 5 page step, 6 key group step, 7 value offset, 8 value group step,
    9 cached row step, 10 page table int32, 11 widest, 12 page_tokens, 13 tasks int64 [n, 9] (token of the first row,
    sequence, first and last + 1 cached token, head block, part of the first row or -1, rows, how many tokens the first
    row sees, parts from one row to the next), 14 n, 15 key width, 16 value width, 17 kind, 18 size, 19 scale bits,
    20 heads, 21 heads of a block, 22 parts float32 [parts, heads of a block, value width + 2] (values, best, total),
    23 window, 24 most rows of a task.
    """
    word = carray(p, 25, np.int64)
    scale = np.float32(carray(p, 25, np.float64)[19])
    tasks = carray(at(word[13]), (word[14], 9), np.int64)
    key_width, width, block = word[15], word[16], word[21]
    most = block * word[24]
    query, queries = np.empty((most, key_width), np.float32), np.empty(most, np.int64)
    score, acc = np.empty((most, FOLD), np.float32), np.empty((most, width), np.float32)
    best, total = np.empty(most, np.float32), np.empty(most, np.float32)
    for q in range(most):
        queries[q] = query.ctypes.data + 4 * q * key_width
    while True:
        number = draw(word.ctypes.data)
        if number >= word[14]:
            break
        task = tasks[number]
        begin, end, head, rows = task[2], task[3], task[4] * block, task[6]
        heads = min(block, word[20] - head)
        for row in range(rows):
            source = word[1] + (task[0] + row) * word[2] + head * key_width * word[18]
            widen(source, queries[row * heads], heads * key_width, word[17])
        for q in range(rows * heads):
            best[q], total[q] = -np.inf, 0
            for i in range(width):
                acc[q, i] = 0
        while begin < end:
            after = min((begin // FOLD + 1) * FOLD, end)
            attend_fold(word, task, heads, begin, after, queries, score, best, total, acc, scale)
            begin = after
        for row in range(rows):
            keep_row(word, task, row, heads, best, total, acc)


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
