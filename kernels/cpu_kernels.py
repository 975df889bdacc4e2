# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""The compiled kernels of the CPU, each a plain C function that every thread of a `Team` runs.

A kernel reads its words, draws task numbers until they run out, and writes only what its task owns, so its result
depends neither on the number of threads nor on who drew what.  Sums run in an order fixed by the row's own width or the
sequence's own length (law 7).  Kernels know addresses and sizes; `cpu.py` knows tensors.

Word 0 is the task counter; each docstring names the other words in order.  Addresses and steps are in bytes; `kind` is
a number format of `vector_code`, `size` its bytes.  Every kernel handles zero tasks and any width.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from bgmpi.kernels.vector_code import at, draw, exponential, largest, make_dots, make_mix, narrow, summed, widen

dots_4x4 = make_dots(4, 4)
dots_4x1 = make_dots(4, 1)
dots_1x1 = make_dots(1, 1)
mix_4 = make_mix(4)
mix_1 = make_mix(1)

#: Cached tokens that one attention task reads; fixed, so that a sequence's sums never depend on its neighbours.
SPAN = 512
#: Bytes of weight that one task of a small linear reads: long enough to stream, short enough to share out.
TASK_BYTES = 65536
#: Rows that one task of a row-by-row kernel takes.
ROWS = 8


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


@njit
def gate(values, count, half):
    """values[i] = silu(values[i]) * values[half + i] for i < count, float32; scratch behind 2 * half."""
    power = values.ctypes.data + 8 * half
    exponential(values.ctypes.data, power, count, np.float32(-1.0), np.float32(0.0))
    for i in range(count):
        values[i] = values[i] / (np.float32(1.0) + values[2 * half + i]) * values[half + i]


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


def sort_pairs(p):
    """Sort (token, expert) pairs by expert, then token.  Alone.

    1 expert int32 [T, A], 2 T, 3 A, 4 E, then int64 results: 5 first pair of each expert [E + 1], 6 number of active
    experts (-1: an expert's number was not below E) and their list [1 + E], 7 token of each pair [pairs], 8 place
    [T, A] (the token's pairs in ascending expert order, -1 behind the last), 9 column [T, A] (which of the token's A
    experts that is).
    """
    word = carray(p, 10, np.int64)
    tokens, active, experts = word[2], word[3], word[4]
    expert = carray(at(word[1]), (tokens, active), np.int32)
    first = carray(at(word[5]), experts + 1, np.int64)
    busy = carray(at(word[6]), experts + 1, np.int64)
    token = carray(at(word[7]), tokens * active, np.int64)
    place = carray(at(word[8]), (tokens, active), np.int64)
    column = carray(at(word[9]), (tokens, active), np.int64)
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


def experts_up(p):
    """hidden = silu(gate) * up of every pair.

    1 x float32, 2 x step, 3 first, 4 active experts, 5 token of pair, 6 weights int64 [E], 7 D, 8 I, 9 kind, 10 size,
    11 hidden float32 [pairs, I], 12 most pairs of one expert.
    """
    word = carray(p, 13, np.int64)
    width, inner, kind, size = word[7], word[8], word[9], word[10]
    each = rows_of_task(2 * width * size)
    blocks = (inner + each - 1) // each
    busy = carray(at(word[4]), 1, np.int64)[0]
    active = carray(at(word[4] + 8), busy, np.int64)
    token_list = np.empty(word[12], np.int64)
    result = np.empty((word[12], 3 * each), np.float32)
    while True:
        task = draw(word.ctypes.data)
        if task >= busy * blocks:
            break
        e, begin = active[task // blocks], task % blocks * each
        span = carray(at(word[3] + 8 * e), 2, np.int64)
        count, tokens = min(each, inner - begin), span[1] - span[0]
        token = carray(at(word[5] + 8 * span[0]), tokens, np.int64)
        for t in range(tokens):
            token_list[t] = word[1] + token[t] * word[2]
        weight = carray(at(word[6] + 8 * e), 1, np.int64)[0] + begin * width * size
        for half in range(2):
            many_dots(weight + half * inner * width * size, width * size, count, token_list.ctypes.data, tokens,
                      result.ctypes.data + half * 4 * each, 12 * each, width, kind)
        for t in range(tokens):
            gate(result[t], count, each)
            narrow(result.ctypes.data + t * 12 * each, word[11] + ((span[0] + t) * inner + begin) * 4, count, 0)


def experts_down(p):
    """y of every pair.

    1 hidden float32 [pairs, I], 2 first, 3 active experts, 4 weights int64 [E], 5 I, 6 D, 7 kind, 8 size,
    9 y float32 [pairs, D], 10 most pairs of one expert.
    """
    word = carray(p, 11, np.int64)
    inner, width, kind, size = word[5], word[6], word[7], word[8]
    each = rows_of_task(inner * size)
    blocks = (width + each - 1) // each
    busy = carray(at(word[3]), 1, np.int64)[0]
    active = carray(at(word[3] + 8), busy, np.int64)
    token_list = np.empty(word[10], np.int64)
    while True:
        task = draw(word.ctypes.data)
        if task >= busy * blocks:
            break
        e, begin = active[task // blocks], task % blocks * each
        span = carray(at(word[2] + 8 * e), 2, np.int64)
        for pair in range(span[0], span[1]):
            token_list[pair - span[0]] = word[1] + pair * inner * 4
        weight = carray(at(word[4] + 8 * e), 1, np.int64)[0] + begin * inner * size
        many_dots(weight, inner * size, min(each, width - begin), token_list.ctypes.data, span[1] - span[0],
                  word[9] + (span[0] * width + begin) * 4, width * 4, inner, kind)


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
    values = np.empty(3 * inner, np.float32)
    while True:
        begin = draw(word.ctypes.data) * ROWS
        if begin >= tokens:
            break
        for t in range(begin, min(begin + ROWS, tokens)):
            widen(word[1] + t * 2 * inner * size, values.ctypes.data, 2 * inner, kind)
            gate(values, inner, inner)
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


@njit
def copy_bytes(source, target, count):
    """Copy an even number of bytes."""
    read = carray(at(source), count // 2, np.uint16)
    write = carray(at(target), count // 2, np.uint16)
    for i in range(count // 2):
        write[i] = read[i]


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
