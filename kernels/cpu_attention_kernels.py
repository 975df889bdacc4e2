# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Attention of query rows over pages, and the writing of new tokens into them.

A row task is a few neighbouring rows of one sequence, one block of heads that share keys, and at most SPAN cached
tokens.  Softmax is folded every FOLD tokens, counted from the sequence's begin.  So what a row gets depends on its own
place and on the window: not on rows that share its task, on chunks, on page size or on threads.  Lane tasks
(`cpu_lane_kernels`) are for many queries that read the same pages.  All of them, and the joins of what more than one
task computed of a row, are one call.  How a kernel is called stands in `cpu_dot_kernels`.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from bgmpi.kernels.cpu_dot_kernels import many_dots
from bgmpi.kernels.cpu_lane_kernels import FOLD, lane_task, place_of, rooms, up
from bgmpi.kernels.cpu_row_kernels import ROWS, copy_bytes
from bgmpi.kernels.task_code import arrive, draw, wait_for
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
def score_fold(word, sequence, group, begin, end, queries, score):
    """score[q, j] = query q . key of cached token begin + j, for all queries."""
    token = begin
    while token < end:
        place, left = place_of(word, sequence, token)
        count = min(left, end - token)
        many_dots(place + group * word[7], word[10], count, queries.ctypes.data, len(queries),
                  score.ctypes.data + 4 * (token - begin), 4 * FOLD, word[22], word[24])
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
    width, token = word[23], begin
    while token < end:
        place, left = place_of(word, sequence, token)
        count = min(left, end - token)
        place += word[8] + group * word[9]
        q = 0
        while q < queries:
            share = score + 4 * (q * FOLD + token - begin)
            target = acc.ctypes.data + 4 * (first + q) * width
            if queries - q >= 4:
                mix_4(place, word[10], count, share, 4 * FOLD, target, 4 * width, width, word[24])
                q += 4
            else:
                mix_1(place, word[10], count, share, 4 * FOLD, target, 4 * width, width, word[24])
                q += 1
        token += count


@njit
def attend_fold(word, task, heads, begin, end, queries, score, best, total, acc, scale):
    """Let the rows of a task see what they may of cached tokens begin .. end - 1, which lie within one fold."""
    sequence, group, rows, seen, window = task[1], task[4], task[6], task[7], word[30]
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
    width, block, size, first = word[23], word[28], word[25], row * heads
    head = task[4] * block
    for h in range(heads):
        if task[5] >= 0:
            part = task[5] + row * task[8]
            state = carray(at(word[29] + 4 * (part * block + h) * (width + 2)), width + 2, np.float32)
            for i in range(width):
                state[i] = acc[first + h, i]
            state[width], state[width + 1] = best[first + h], total[first + h]
        else:
            for i in range(width):
                acc[first + h, i] /= total[first + h]
            target = word[4] + ((task[0] + row) * word[27] + head + h) * width * size
            narrow(acc.ctypes.data + 4 * (first + h) * width, target, width, word[24])


@njit
def row_task(word, task, query, queries, score, best, total, acc, scale):
    """Let some neighbouring rows of one sequence see at most SPAN cached tokens, folds counted from its begin.

    task: token of the first row, sequence, first and last + 1 cached token, head block, part of the first row or -1,
    rows, how many tokens the first row sees, parts from one row to the next.
    """
    begin, end, head, rows, width = task[2], task[3], task[4] * word[28], task[6], word[22]
    heads = min(word[28], word[27] - head)
    for row in range(rows):
        source = word[2] + (task[0] + row) * word[3] + head * width * word[25]
        widen(source, queries[row * heads], heads * width, word[24])
    for q in range(rows * heads):
        best[q], total[q] = -np.inf, 0
        for i in range(acc.shape[1]):
            acc[q, i] = 0
    while begin < end:
        after = min((begin // FOLD + 1) * FOLD, end)
        attend_fold(word, task, heads, begin, after, queries, score, best, total, acc, scale)
        begin = after
    for row in range(rows):
        keep_row(word, task, row, heads, best, total, acc)


@njit
def join_parts(word, join, acc):
    """Join the parts of one row and head block, in the order of their tokens.

    join: token, head block, first part, parts.
    """
    token, group, first, count = join
    width, block = word[23], word[28]
    parts = carray(at(word[29] + 4 * first * block * (width + 2)), (count, block, width + 2), np.float32)
    for h in range(min(block, word[27] - group * block)):
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
        target = word[4] + (token * word[27] + group * block + h) * width * word[25]
        narrow(acc.ctypes.data, target, width, word[24])


def attend(p):
    """Attention of query rows over pages: tasks with queries in lanes, tasks of neighbouring rows, then the joins of
    what more than one task computed, which wait until all of those are done.

    1 tasks done (0 before the call), 2 query, 3 query token step, 4 out, 5 pages, 6 page step, 7 key group step, 8
    value offset, 9 value group step, 10 cached row step, 11 page table int32, 12 widest, 13 page_tokens, 14 row tasks
    int64 [n, 9] (see `row_task`), 15 n, 16 lane tasks int64 [n, 9] and 18 rows listed in them int64 [m, 4] (see
    `lane_task`), 17 n, 19 m, 20 joins int64 [n, 4] (see `join_parts`), 21 n, 22 key width, 23 value width, 24 kind,
    25 size, 26 scale bits, 27 heads, 28 heads of a block, 29 parts float32 [parts, heads of a block, value width + 2]
    (values, best, total), 30 window, 31 most rows of a row task.
    """
    word = carray(p, 32, np.int64)
    scale = np.float32(carray(p, 32, np.float64)[26])
    rows, lanes = carray(at(word[14]), (word[15], 9), np.int64), carray(at(word[16]), (word[17], 9), np.int64)
    listed, joins = carray(at(word[18]), (word[19], 4), np.int64), carray(at(word[20]), (word[21], 4), np.int64)
    number, done = draw(word.ctypes.data), word.ctypes.data + 8
    if number < len(lanes):
        room = rooms(word[22], word[23])
        held = np.empty(room[-1] + 64, np.uint8)
        room += up(held.ctypes.data, 64)
        while number < len(lanes):
            lane_task(word, room, lanes[number], listed, scale)
            arrive(done)
            number = draw(word.ctypes.data)
        held[0] = 0  # it must live until here
    number -= len(lanes)
    most = word[28] * word[31]
    query, queries = np.empty((most, word[22]), np.float32), np.empty(most, np.int64)
    score, acc = np.empty((most, FOLD), np.float32), np.empty((most, word[23]), np.float32)
    best, total = np.empty(most, np.float32), np.empty(most, np.float32)
    for q in range(most):
        queries[q] = query.ctypes.data + 4 * q * word[22]
    while number < len(rows):
        row_task(word, rows[number], query, queries, score, best, total, acc, scale)
        arrive(done)
        number = draw(word.ctypes.data) - len(lanes)
    number -= len(rows)
    if number < len(joins):
        wait_for(done, len(lanes) + len(rows))
    while number < len(joins):
        join_parts(word, joins[number], acc[0])
        number = draw(word.ctypes.data) - len(lanes) - len(rows)
