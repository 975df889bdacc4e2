# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Linear layers and experts of bfloat16 weights through matrix tiles, for one token and for thousands alike.

One call of the team does a whole layer: its tasks come in kinds that need one another (lay tokens in panels, gate and
up rows, down rows, weighted sums), in ascending numbers, and a task waits only for those of its own expert (see
`task_code`).  A task is a span of weight rows, long enough to stream from memory and short enough to stay in a core's
cache while up to GROUP panels of tokens pass; so with few tokens each weight is read once at the memory's speed, and
with many the tiles do all the work.  A span that lies across the cache's lines and that many tokens pass is laid tile
behind tile in its thread's cache before; the numbers and their order stay.  How a kernel is called stands in
`cpu_dot_kernels`.

The number of a panel's tokens is that of the expert (or the call) up to 16, so one token moves 4 bytes a line, not 64.
Sums run along the width in one order whatever the number of tokens (`tile_code`).  Widths of weights are multiples of
32, rows at least 16; `cpu_tiles` pads what is not.  Rows that do not fill the last tile are computed with some of their
forerunners, twice to the same bits.  Parts of a kernel are inlined before they are compiled, in half the time.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from bgmpi.kernels.cpu_expert_kernels import sort_by_expert
from bgmpi.kernels.cpu_row_kernels import ROWS
from bgmpi.kernels.task_code import arrive, draw, wait_for
from bgmpi.kernels.tile_code import (
    DEEP,
    SHAPE_BYTES,
    TILE,
    TILE_BYTES,
    expect_tokens,
    lay_tiles,
    make_product,
    pack_panel,
    release_tiles,
    shape_tiles,
    store_gated,
    store_tokens,
)
from bgmpi.kernels.vector_code import at, make_mix, narrow

product_1 = make_product(1)
product_2 = make_product(2)
mix_1 = make_mix(1)

#: Panels that pass one span of weight rows in a task; even.
GROUP = 64
#: Panels that a span of weights passes as it lies, however it lies.
AS_IT_LIES = 4


@njit(inline="always")
def multiply(low, high, laid, panel, panels, tokens, width, out, ahead):
    """Multiply two tiles of weight rows, low and high, with one panel or two of this many tokens each.

    laid: low and high lie there in tiles; 0: they are plain rows.
    """
    if laid:
        low, high, step, tile_step = laid, laid + TILE_BYTES, 2 * DEEP, 2 * TILE_BYTES
    else:
        step, tile_step = 2 * width, 2 * DEEP
    if panels == 1:
        product_1(low, high, step, tile_step, panel, 0, 4 * tokens, width // DEEP, out, ahead)
    else:
        product_2(low, high, step, tile_step, panel, 2 * TILE * width, 4 * tokens, width // DEEP, out, ahead)


@njit(inline="always")
def own_room(size):
    """Return `size` bytes of this thread, and where in them a multiple of 64 begins."""
    room = np.empty(size + 64, np.uint8)
    return room, (room.ctypes.data + 63) // 64 * 64


@njit(inline="always")
def lay_panel(x, step, width, token, pairs, target, wide, addresses):
    """Lay the rows of tokens token[:pairs], at most 16, as a panel `wide` tokens wide."""
    for i in range(TILE):
        addresses[i] = x + token[min(i, pairs - 1)] * step
    pack_panel(addresses.ctypes.data, width, target, wide)


@njit(inline="always")
def multiply_span(
    weight, begin, end, rows, width, panel, panels, tokens, wide, bias, bias_step, target, kept, out, room
):
    """target[t, r] = weight row r . token t + bias[r] for rows begin .. end - 1 and all `tokens` of the panels.

    rows: rows of the weight; wide: tokens a panel has room for; bias_step: bytes between its numbers, 4 or (16 zeros
    for all) 0; kept: columns of target; room: where the span has room in tiles.
    """
    again = panels > AS_IT_LIES and weight % (2 * DEEP) != 0
    if again:
        for r in range(begin, end, 2 * TILE):
            low, high = min(r, rows - TILE), min(r + TILE, rows - TILE)
            lay_tiles(weight + low * 2 * width, weight + high * 2 * width, 2 * width, width // DEEP,
                      room + (r - begin) * 2 * width)
    for q in range(0, panels, 2):
        both = min(2, panels - q)
        for r in range(begin, end, 2 * TILE):
            low, high = min(r, rows - TILE), min(r + TILE, rows - TILE)
            expect_tokens(target + (TILE * q * kept + low) * 2, 2 * kept, min(2 * TILE, tokens - TILE * q))
            laid = room + (r - begin) * 2 * width if again else 0
            multiply(weight + low * 2 * width, weight + high * 2 * width, laid, panel + q * 2 * TILE * width, both,
                     wide, width, out, 4 * TILE * width)
            for number in range(both):
                first = TILE * (q + number)
                place = target + first * kept * 2
                store_tokens(out + 2 * TILE_BYTES * number, bias + bias_step * low, bias + bias_step * high,
                             place + 2 * low, place + 2 * high, min(TILE, kept - low), 2 * kept,
                             min(TILE, tokens - first))


def linear(p):
    """out = x @ weight.T + bias.

    1 panels laid (0 before the call), 2 x, 3 x step, 4 width of x, 5 weight, 6 width of the weight, 7 its rows,
    8 bias float32 [rows], 9 out [T, N], 10 T, 11 N, 12 rows of a task, 13 panels, 14 shapes.
    """
    word = carray(p, 15, np.int64)
    width, rows, tokens, each = word[6], word[7], word[10], word[12]
    panels, wide = (tokens + TILE - 1) // TILE, min(tokens, TILE)
    groups, blocks = (panels + GROUP - 1) // GROUP, (rows + each - 1) // each
    token, addresses = np.empty(TILE, np.int64), np.empty(TILE, np.int64)
    # Columns behind the last token are computed with too, and denormal leftovers would cost dear: hence zeros.
    out = np.zeros(4 * TILE_BYTES, np.uint8)
    kept, room = own_room((each + 2 * TILE) * 2 * width if panels > AS_IT_LIES else 0)
    shape_tiles(word[14] + SHAPE_BYTES * wide)
    while True:
        task = draw(word.ctypes.data)
        if task < panels:
            for i in range(TILE):
                token[i] = task * TILE + i
            lay_panel(word[2], word[3], word[4], token, min(TILE, tokens - task * TILE),
                      word[13] + task * 2 * TILE * width, wide, addresses)
            arrive(word.ctypes.data + 8)
            continue
        task -= panels
        if task >= groups * blocks:
            break
        wait_for(word.ctypes.data + 8, panels)
        first, begin = task // blocks * GROUP, task % blocks * each
        multiply_span(word[5], begin, min(begin + each, rows), rows, width, word[13] + first * 2 * TILE * width,
                      min(GROUP, panels - first), min(GROUP * TILE, tokens - first * TILE), wide, word[8], 4,
                      word[9] + first * TILE * word[11] * 2, word[11], out.ctypes.data, room)
    kept[0] = 0  # it must live until here
    release_tiles()


@njit(inline="always")
def gate_span(weight, begin, end, rows, width, panel, panels, wide, target, out, room):
    """Lay silu(gate row . token) * (up row . token) of rows begin .. end - 1 as panels for the down weights.

    weight: gate rows, then up rows, `rows` each, a multiple of 32; room: where the span has room in tiles.
    """
    again = panels > AS_IT_LIES and weight % (2 * DEEP) != 0
    if again:
        for r in range(begin, end, TILE):
            low = weight + r * 2 * width
            lay_tiles(low, low + rows * 2 * width, 2 * width, width // DEEP, room + (r - begin) * 4 * width)
    for q in range(0, panels, 2):
        both = min(2, panels - q)
        for r in range(begin, end, TILE):
            low = weight + r * 2 * width
            laid = room + (r - begin) * 4 * width if again else 0
            multiply(low, low + rows * 2 * width, laid, panel + q * 2 * TILE * width, both, wide, width, out,
                     2 * TILE * width)
            for number in range(both):
                place = target + (q + number) * 2 * TILE * rows + r // 2 * 4 * wide
                store_gated(out + 2 * TILE_BYTES * number, out + TILE_BYTES * (2 * number + 1), place, wide)


@njit(inline="always")
def weigh_parts(t, share, place, column, y, width, total, target):
    """Sum the bfloat16 parts of token t in ascending expert order: target = sum of share * y row."""
    total[:] = 0
    for k in range(place.shape[1]):
        if place[t, k] < 0:
            break
        mix_1(y + place[t, k] * width * 2, 0, 1, share + 4 * (t * place.shape[1] + column[t, k]), 0,
              total.ctypes.data, 0, width, 1)
    narrow(total.ctypes.data, target + t * width * 2, width, 1)


@njit(inline="always")
def number_tasks(first, busy, panel_begin, group_begin, laid, gated):
    """Say which panels and groups of panels the k-th active expert has; no task has arrived yet."""
    panel_begin[0] = group_begin[0] = 0
    for k in range(busy[0]):
        panels = (first[busy[k + 1] + 1] - first[busy[k + 1]] + TILE - 1) // TILE
        panel_begin[k + 1] = panel_begin[k] + panels
        group_begin[k + 1] = group_begin[k] + (panels + GROUP - 1) // GROUP
        laid[k] = gated[k] = 0


@njit(inline="always")
def open_book(word):
    """Take the bookkeeping apart: first, busy, token, place, column; panel and group begin; laid, gated."""
    tokens, active, count = word[7], word[8], word[9]
    pairs, ends = tokens * active, count + 1
    book = carray(at(word[24]), 6 * ends + 3 * pairs, np.int64)
    sides, tail = book[2 * ends + pairs :], book[2 * ends + 3 * pairs :].reshape(4, ends)
    return (
        book[:ends], book[ends : 2 * ends], book[2 * ends :][:pairs], sides[:pairs].reshape(tokens, active),
        sides[pairs : 2 * pairs].reshape(tokens, active), tail[0], tail[1], tail[2], tail[3],
    )


@njit(inline="always")
def lay_task(word, book, k, task, addresses):
    """Lay panel number `task`, which is one of the k-th active expert's."""
    first, busy, token, panel_begin, laid = book[0], book[1], book[2], book[5], book[7]
    bottom, end = first[busy[k + 1]], first[busy[k + 1] + 1]
    begin = bottom + (task - panel_begin[k]) * TILE
    lay_panel(word[3], word[4], word[10], token[begin:], min(TILE, end - begin),
              word[18] + task * 2 * TILE * word[11], min(TILE, end - bottom), addresses)
    arrive(laid.ctypes.data + 8 * k)


@njit(inline="always")
def span_task(word, book, k, group, span, up, ups, shaped, out, room):
    """Run one span of gate and up rows, or of down rows, of the k-th active expert over one group of its panels.

    Returns for how many tokens a panel the tiles have their shape now.
    """
    first, busy, panel_begin, group_begin, laid, gated = book[0], book[1], book[5], book[6], book[7], book[8]
    width, deep, inner, rows = word[10], word[11], word[12], word[13]
    e, begin = busy[k + 1], (group - group_begin[k]) * GROUP
    pair, panel = first[e] + begin * TILE, panel_begin[k] + begin
    panels, wide = min(GROUP, panel_begin[k + 1] - panel), min(TILE, first[e + 1] - first[e])
    if wide != shaped:
        shape_tiles(word[22] + SHAPE_BYTES * wide)
    middle = word[19] + panel * 2 * TILE * inner
    weight = carray(at(word[14 if up else 15] + 8 * e), 1, np.int64)[0]
    if up:
        wait_for(laid.ctypes.data + 8 * k, panel_begin[k + 1] - panel_begin[k])
        gate_span(weight, span * word[16], min(inner, (span + 1) * word[16]), inner, deep,
                  word[18] + panel * 2 * TILE * deep, panels, wide, middle, out, room)
        arrive(gated.ctypes.data + 8 * k)
    else:
        wait_for(gated.ctypes.data + 8 * k, (group_begin[k + 1] - group_begin[k]) * ups)
        multiply_span(weight, span * word[17], min(rows, (span + 1) * word[17]), rows, inner, middle, panels,
                      min(GROUP * TILE, first[e + 1] - pair), wide, word[23], 0, word[20] + pair * width * 2, width,
                      out, room)
        arrive(word.ctypes.data + 16)
    return wide


def experts(p):
    """Gated experts: out[t] = sum of weight * down(silu(gate(x[t])) * up(x[t])), ascending expert order, float32.

    1 sorted (0 before the call), 2 finished (0), 3 x, 4 x step, 5 expert int32 [T, A], 6 weight float32 [T, A], 7 T,
    8 A, 9 E, 10 D, 11 width of gate and up weights, 12 I: their rows and the width of down weights, 13 rows of down
    weights, 14 gate_up, 15 down addresses int64 [E], 16 rows of a gate and up task, 17 of a down task, 18 panels of x,
    19 panels of the middle, 20 y [pairs, D], 21 out, 22 shapes, 23 zeros float32 [16], 24 bookkeeping int64: as
    `sort_pairs` has it, then first panel and first group of each active expert [E + 1] each, panels laid and spans
    gated of each [E] each.
    """
    word = carray(p, 25, np.int64)
    tokens, active, count = word[7], word[8], word[9]
    book = open_book(word)
    busy, panel_begin, group_begin = book[1], book[5], book[6]
    expert = carray(at(word[5]), (tokens, active), np.int32)
    task = draw(word.ctypes.data)
    if task == 0:
        sort_by_expert(expert, count, book[0], busy, book[2], book[3], book[4])
        number_tasks(book[0], busy, panel_begin, group_begin, book[7], book[8])
        arrive(word.ctypes.data + 8)
        task = draw(word.ctypes.data)
    wait_for(word.ctypes.data + 8, 1)
    if busy[0] < 0:
        return
    ups, downs = (word[12] + word[16] - 1) // word[16], (word[13] + word[17] - 1) // word[17]
    panels, groups = panel_begin[busy[0]], group_begin[busy[0]]
    addresses, out = np.empty(TILE, np.int64), np.zeros(4 * TILE_BYTES, np.uint8)
    total = np.empty(word[10], np.float32)
    most = 0
    for k in range(busy[0]):
        most = max(most, panel_begin[k + 1] - panel_begin[k])
    size = max(word[16] * 4 * word[11], (word[17] + 2 * TILE) * 2 * word[12])
    kept, room = own_room(size if most > AS_IT_LIES else 0)
    shaped = k = stage = 0
    while True:
        task -= 1
        now = 0 if task < panels else 1 if task < panels + groups * ups else 2
        if now != stage:
            stage, k = now, 0
        if stage == 0:
            while task >= panel_begin[k + 1]:
                k += 1
            lay_task(word, book, k, task, addresses)
        elif task < panels + groups * (ups + downs):
            number, spans = (task - panels, ups) if stage == 1 else (task - panels - groups * ups, downs)
            while number // spans >= group_begin[k + 1]:
                k += 1
            shaped = span_task(word, book, k, number // spans, number % spans, stage == 1, ups, shaped,
                               out.ctypes.data, room)
        else:
            begin = (task - panels - groups * (ups + downs)) * ROWS
            if begin >= tokens:
                break
            wait_for(word.ctypes.data + 16, groups * downs)
            for t in range(begin, min(begin + ROWS, tokens)):
                weigh_parts(t, word[6], book[3], book[4], word[20], word[10], total, word[21])
        task = draw(word.ctypes.data)
    kept[0] = 0  # it must live until here
    release_tiles()
