# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""bfloat16 linear layers and experts by panels of rows (`panel_code`), on machines that add pairs of products.

A task turns a panel of its weight rows and lets all its tokens pass it, six at a time, so that the panel stays in the
core's second cache and is turned once.  Wide rows are taken in blocks of columns whose sums go on in memory; the order
of a sum is the order of the columns in any case.  How a kernel is called stands in `cpu_dot_kernels`.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from bgmpi.kernels.panel_code import LANES, PAIR_BYTES, PANEL_ROWS, TILE_TOKENS, VECTORS, make_tile, turn_rows
from bgmpi.kernels.task_code import draw
from bgmpi.kernels.vector_code import at, gate, narrow

tile_1, tile_2, tile_3, tile_4, tile_5, tile_6 = (make_tile(tokens + 1) for tokens in range(TILE_TOKENS))

#: Pairs of columns in a block, so that two panels of them fit into a core's second cache.
BLOCK_PAIRS = 1024
#: Tokens whose sums a task holds at a time.
GROUP = 96
#: bfloat16, as `emit` numbers it.
KIND = 1


@njit
def room(panels, pairs):
    """Return memory for so many panels and the address in it that is a multiple of 64."""
    # One line more, so that the vectors of a panel do not fall on the same places of the first cache.
    vector_step = ((min(pairs, BLOCK_PAIRS) + LANES - 1) // LANES * LANES + 1) * PAIR_BYTES
    held = np.empty(panels * VECTORS * vector_step + 64, np.uint8)
    return held, (held.ctypes.data + 63) // 64 * 64, vector_step


@njit
def turn_panel(row, row_step, rows, pairs, panel, vector_step, ahead):
    """Turn `rows` rows, at most a panel of them; `ahead` are turned next."""
    for v in range((rows + LANES - 1) // LANES):
        here, after = row + v * LANES * row_step, row + (v + 1) * LANES * row_step
        last = rows - 1 - v * LANES
        turn_rows(here, row_step, last, pairs, panel + v * vector_step, ahead if last < LANES else after)


@njit
def pass_tokens(panel, vector_step, pairs, token_list, tokens, out, out_step, fresh, ahead):
    """out[t] += panel . token t for any number of tokens.  ahead: addresses between which memory is asked for."""
    for t in range(0, tokens, TILE_TOKENS):
        step, some = 64 if ahead[0] < ahead[1] else 0, min(TILE_TOKENS, tokens - t)
        here, target = token_list + 8 * t, out + out_step * t
        if some == 6:
            tile_6(panel, vector_step, pairs, here, target, out_step, fresh, ahead[0], step)
        elif some == 5:
            tile_5(panel, vector_step, pairs, here, target, out_step, fresh, ahead[0], step)
        elif some == 4:
            tile_4(panel, vector_step, pairs, here, target, out_step, fresh, ahead[0], step)
        elif some == 3:
            tile_3(panel, vector_step, pairs, here, target, out_step, fresh, ahead[0], step)
        elif some == 2:
            tile_2(panel, vector_step, pairs, here, target, out_step, fresh, ahead[0], step)
        else:
            tile_1(panel, vector_step, pairs, here, target, out_step, fresh, ahead[0], step)
        ahead[0] += step * pairs


@njit
def panels_of_task(rows_at, count, row_step, pairs, panel, vector_step, token_list, tokens, result, turned, ahead):
    """result[t, panel i] = the `count` rows from rows_at[i] on . token t.

    rows_at: one address more than panels, that of the rows needed next.  turned: the panels are there already.
    """
    out_step = result.strides[0]
    for begin in range(0, pairs, BLOCK_PAIRS):
        some = min(BLOCK_PAIRS, pairs - begin)
        for i in range(len(rows_at) - 1):
            here = panel + i * VECTORS * vector_step
            if not turned or pairs > BLOCK_PAIRS:
                turn_panel(rows_at[i] + 4 * begin, row_step, count, some, here, vector_step, rows_at[i + 1])
                ahead[0] = rows_at[i + 1]
                ahead[1] = ahead[0] + (PANEL_ROWS * row_step if pairs <= BLOCK_PAIRS else 0)
            pass_tokens(here, vector_step, some, token_list.ctypes.data, tokens,
                        result.ctypes.data + i * 4 * PANEL_ROWS, out_step, begin == 0, ahead)
        for t in range(tokens):
            token_list[t] += 4 * BLOCK_PAIRS


@njit
def rows_of_task(task, busy, weights, rows, row_step):
    """Return the address of the weight rows that task number `task` needs first, and the expert."""
    panels = (rows + PANEL_ROWS - 1) // PANEL_ROWS
    e = carray(at(busy + 8 + 8 * (task // panels)), 1, np.int64)[0]
    return carray(at(weights + 8 * e), 1, np.int64)[0] + task % panels * PANEL_ROWS * row_step, e


@njit
def up_task(word, task, following, panel, vector_step, rows_at, token_list, result, ahead):
    """Run one panel of gate and one of up rows over all pairs of one expert, group by group."""
    width, inner = word[7], word[8]
    begin = task % ((inner + PANEL_ROWS - 1) // PANEL_ROWS) * PANEL_ROWS
    rows_at[0], e = rows_of_task(task, word[4], word[6], inner, width * 2)
    rows_at[1] = rows_at[0] + inner * width * 2
    rows_at[2] = rows_of_task(following, word[4], word[6], inner, width * 2)[0]
    count = min(PANEL_ROWS, inner - begin)
    span, token = carray(at(word[3] + 8 * e), 2, np.int64), carray(at(word[5]), word[10], np.int64)
    for first in range(span[0], span[1], GROUP):
        some = min(GROUP, span[1] - first)
        for t in range(some):
            token_list[t] = word[1] + token[first + t] * word[2]
        panels_of_task(rows_at, count, width * 2, width // 2, panel, vector_step, token_list, some, result,
                       first > span[0], ahead)
        for t in range(some):
            row = result.ctypes.data + t * result.strides[0]
            gate(row, row + 4 * PANEL_ROWS, count)
            narrow(row, word[9] + ((first + t) * inner + begin) * 2, count, KIND)


def experts_up(p):
    """hidden = silu(gate) * up of every pair.

    1 x, 2 x step, 3 first, 4 active experts, 5 token of pair, 6 weights int64 [E], 7 D, even, 8 I, 9 hidden [pairs, I],
    10 pairs.
    """
    word = carray(p, 11, np.int64)
    inner = word[8]
    tasks = carray(at(word[4]), 1, np.int64)[0] * ((inner + PANEL_ROWS - 1) // PANEL_ROWS)
    held, panel, vector_step = room(2, word[7] // 2)
    rows_at, token_list, ahead = np.empty(3, np.int64), np.empty(GROUP, np.int64), np.empty(2, np.int64)
    result = np.empty((GROUP, 2 * PANEL_ROWS), np.float32)
    task = draw(word.ctypes.data)
    while task < tasks:
        following = draw(word.ctypes.data)
        up_task(word, task, min(following, tasks - 1), panel, vector_step, rows_at, token_list, result, ahead)
        task = following
    held[0] = 0  # it must live until here


@njit
def down_task(word, task, following, panel, vector_step, rows_at, token_list, result, ahead):
    """Run one panel of down rows over all pairs of one expert, group by group."""
    inner, width = word[5], word[6]
    begin = task % ((width + PANEL_ROWS - 1) // PANEL_ROWS) * PANEL_ROWS
    rows_at[0], e = rows_of_task(task, word[3], word[4], width, inner * 2)
    rows_at[1] = rows_of_task(following, word[3], word[4], width, inner * 2)[0]
    count, span = min(PANEL_ROWS, width - begin), carray(at(word[2] + 8 * e), 2, np.int64)
    for first in range(span[0], span[1], GROUP):
        some = min(GROUP, span[1] - first)
        for t in range(some):
            token_list[t] = word[1] + (first + t) * inner * 2
        panels_of_task(rows_at, count, inner * 2, inner // 2, panel, vector_step, token_list, some, result,
                       first > span[0], ahead)
        for t in range(some):
            target = word[7] + ((first + t) * width + begin) * 2
            narrow(result.ctypes.data + t * result.strides[0], target, count, KIND)


def experts_down(p):
    """y of every pair.

    1 hidden [pairs, I], 2 first, 3 active experts, 4 weights int64 [E], 5 I, even, 6 D, 7 y [pairs, D].
    """
    word = carray(p, 8, np.int64)
    tasks = carray(at(word[3]), 1, np.int64)[0] * ((word[6] + PANEL_ROWS - 1) // PANEL_ROWS)
    held, panel, vector_step = room(1, word[5] // 2)
    rows_at, token_list, ahead = np.empty(2, np.int64), np.empty(GROUP, np.int64), np.empty(2, np.int64)
    result = np.empty((GROUP, PANEL_ROWS), np.float32)
    task = draw(word.ctypes.data)
    while task < tasks:
        following = draw(word.ctypes.data)
        down_task(word, task, min(following, tasks - 1), panel, vector_step, rows_at, token_list, result, ahead)
        task = following
    held[0] = 0  # it must live until here
