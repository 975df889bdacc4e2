# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""bfloat16 linear layers and experts by panels of rows (`panel_code`), on machines that add pairs of products.

A task takes one panel of a weight's rows and lets tokens pass, six at a time, so that the panel stays in the
core's second cache; meanwhile it asks for the panel that its thread needs next, for which it draws early.  Wide rows
are taken in blocks of columns, whose sums go on in memory: the order of a sum is the order of the columns in any case.
How a kernel is called stands in `cpu_dot_kernels`.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from bgmpi.kernels.emit import BFLOAT16, LANES
from bgmpi.kernels.panel_code import PAIR_BYTES, PANEL_ROWS, TILE_TOKENS, make_tile, turn_rows
from bgmpi.kernels.task_code import draw
from bgmpi.kernels.vector_code import at, gate, narrow, widen

tile_1, tile_2, tile_3, tile_4, tile_5, tile_6 = (make_tile(tokens + 1) for tokens in range(TILE_TOKENS))

#: Pairs of columns in a block, so that two panels of them fit into a core's second cache.
BLOCK_PAIRS = 1024
#: Tokens whose sums a task holds at a time.
GROUP = 96


@njit
def panels_of(rows):
    """How many panels so many rows take."""
    return (rows + PANEL_ROWS - 1) // PANEL_ROWS


@njit
def panel_bytes(width):
    """How many bytes a panel of rows of this even width takes."""
    return (width // 2 + LANES - 1) // LANES * LANES * PAIR_BYTES


def turn(p):
    """Lay rows in panels.  1 rows [N, K], 2 N, 3 K, even, 4 panels, a multiple of 64."""
    word = carray(p, 5, np.int64)
    rows, width = word[2], word[3]
    while True:
        task = draw(word.ctypes.data)
        if task >= panels_of(rows):
            break
        begin, target = task * PANEL_ROWS, word[4] + task * panel_bytes(width)
        # Rows behind the last repeat it; nobody reads what they give.
        for first in range(0, PANEL_ROWS, LANES):
            row = min(begin + first, rows - 1)
            turn_rows(word[1] + row * 2 * width, 2 * width, rows - 1 - row, width // 2, target + 4 * first)


@njit
def pass_tokens(panel, pairs, token_list, tokens, out, out_step, fresh, ahead):
    """out[t] += panel . token t for any number of tokens.  ahead: addresses between which memory is asked for."""
    for t in range(0, tokens, TILE_TOKENS):
        step, some = 64 if ahead[0] < ahead[1] else 0, min(TILE_TOKENS, tokens - t)
        here, target = token_list + 8 * t, out + out_step * t
        if some == 6:
            tile_6(panel, pairs, here, target, out_step, fresh, ahead[0], step)
        elif some == 5:
            tile_5(panel, pairs, here, target, out_step, fresh, ahead[0], step)
        elif some == 4:
            tile_4(panel, pairs, here, target, out_step, fresh, ahead[0], step)
        elif some == 3:
            tile_3(panel, pairs, here, target, out_step, fresh, ahead[0], step)
        elif some == 2:
            tile_2(panel, pairs, here, target, out_step, fresh, ahead[0], step)
        else:
            tile_1(panel, pairs, here, target, out_step, fresh, ahead[0], step)
        ahead[0] += step * pairs


@njit
def multiply(panels, pairs, token_list, tokens, result, ahead):
    """result[t, i] = panel i . token t; panels: int64 addresses; token_list is used up."""
    step = result.strides[0]
    for begin in range(0, pairs, BLOCK_PAIRS):
        some = min(BLOCK_PAIRS, pairs - begin)
        for i in range(len(panels)):
            pass_tokens(panels[i] + begin * PAIR_BYTES, some, token_list.ctypes.data, tokens,
                        result.ctypes.data + i * 4 * PANEL_ROWS, step, begin == 0, ahead)
        for t in range(tokens):
            token_list[t] += 4 * BLOCK_PAIRS


@njit
def linear_task(word, number, first, some, panels, token_list, result, bias, ahead):
    """Multiply tokens [first, first + some) with the rows of one panel that are asked for."""
    start, stop = max(word[8], number * PANEL_ROWS), min(word[9], (number + 1) * PANEL_ROWS)
    count, rows = stop - start, word[9] - word[8]
    skipped = 4 * (start - number * PANEL_ROWS)
    panels[0] = word[3] + number * panel_bytes(word[7])
    for t in range(some):
        token_list[t] = word[1] + (first + t) * word[2]
    multiply(panels, word[7] // 2, token_list, some, result, ahead)
    if word[4] != 0:
        widen(word[4] + 2 * (start - word[8]), bias.ctypes.data + skipped, count, BFLOAT16)
        for t in range(some):
            for r in range(PANEL_ROWS):
                result[t, r] += bias[r]
    for t in range(some):
        row = result.ctypes.data + t * result.strides[0] + skipped
        narrow(row, word[5] + 2 * ((first + t) * rows + start - word[8]), count, BFLOAT16)


def linear(p):
    """out = x @ rows [start, stop) of the weight + bias.

    1 x, 2 x step, 3 panels, 4 bias [stop - start] or 0, 5 out [T, stop - start], 6 T, 7 K, even, 8 start, 9 stop.
    """
    word = carray(p, 10, np.int64)
    tokens, low = word[6], word[8] // PANEL_ROWS
    groups = (tokens + GROUP - 1) // GROUP
    each = ((tokens + groups - 1) // max(groups, 1) + TILE_TOKENS - 1) // TILE_TOKENS * TILE_TOKENS
    tasks = groups * (panels_of(word[9]) - low)
    panels, token_list, ahead = np.empty(1, np.int64), np.empty(each, np.int64), np.empty(2, np.int64)
    result, bias = np.empty((each, PANEL_ROWS), np.float32), np.zeros(PANEL_ROWS, np.float32)
    task = draw(word.ctypes.data)
    while task < tasks:
        following = draw(word.ctypes.data)
        ahead[0] = word[3] + (low + min(following, tasks - 1) // groups) * panel_bytes(word[7])
        ahead[1] = ahead[0] + min(panel_bytes(word[7]), BLOCK_PAIRS * PAIR_BYTES)
        first = task % groups * each
        linear_task(word, low + task // groups, first, min(each, tokens - first), panels, token_list, result, bias,
                    ahead)
        task = following


@njit
def expert_of(task, busy, rows):
    """Return the expert of a task, and its panel."""
    return carray(at(busy + 8 + 8 * (task // panels_of(rows))), 1, np.int64)[0], task % panels_of(rows)


@njit
def panel_of_task(task, busy, weights, rows, width):
    """Return the address of the first panel that a task needs."""
    e, number = expert_of(task, busy, rows)
    return carray(at(weights + 8 * e), 1, np.int64)[0] + number * panel_bytes(width)


@njit
def up_task(word, task, panels, token_list, result, ahead):
    """Run one panel of gate and one of up rows over all pairs of one expert, group by group."""
    width, inner = word[7], word[8]
    e, number = expert_of(task, word[4], inner)
    panels[0] = panel_of_task(task, word[4], word[6], inner, width)
    panels[1] = panels[0] + panels_of(inner) * panel_bytes(width)
    begin, span = number * PANEL_ROWS, carray(at(word[3] + 8 * e), 2, np.int64)
    count, token = min(PANEL_ROWS, inner - begin), carray(at(word[5]), span[1], np.int64)
    for first in range(span[0], span[1], GROUP):
        some = min(GROUP, span[1] - first)
        for t in range(some):
            token_list[t] = word[1] + token[first + t] * word[2]
        multiply(panels, width // 2, token_list, some, result, ahead)
        for t in range(some):
            row = result.ctypes.data + t * result.strides[0]
            gate(row, row + 4 * PANEL_ROWS, count)
            narrow(row, word[9] + ((first + t) * inner + begin) * 2, count, BFLOAT16)


def experts_up(p):
    """hidden = silu(gate) * up of every pair.

    1 x, 2 x step, 3 first, 4 active experts, 5 token of pair, 6 weights int64 [E] (panels of the gate, then of up),
    7 D, 8 I, both even, 9 hidden [pairs, I].
    """
    word = carray(p, 10, np.int64)
    tasks = carray(at(word[4]), 1, np.int64)[0] * panels_of(word[8])
    panels, token_list, ahead = np.empty(2, np.int64), np.empty(GROUP, np.int64), np.empty(2, np.int64)
    result = np.empty((GROUP, 2 * PANEL_ROWS), np.float32)
    task = draw(word.ctypes.data)
    while task < tasks:
        following = draw(word.ctypes.data)
        ahead[0] = panel_of_task(min(following, tasks - 1), word[4], word[6], word[8], word[7])
        ahead[1] = ahead[0] + min(panel_bytes(word[7]), BLOCK_PAIRS * PAIR_BYTES)
        up_task(word, task, panels, token_list, result, ahead)
        task = following


@njit
def down_task(word, task, panels, token_list, result, ahead):
    """Run one panel of down rows over all pairs of one expert, group by group."""
    inner, width = word[5], word[6]
    e, number = expert_of(task, word[3], width)
    panels[0] = panel_of_task(task, word[3], word[4], width, inner)
    begin, span = number * PANEL_ROWS, carray(at(word[2] + 8 * e), 2, np.int64)
    count = min(PANEL_ROWS, width - begin)
    for first in range(span[0], span[1], GROUP):
        some = min(GROUP, span[1] - first)
        for t in range(some):
            token_list[t] = word[1] + (first + t) * inner * 2
        multiply(panels, inner // 2, token_list, some, result, ahead)
        for t in range(some):
            row = result.ctypes.data + t * result.strides[0]
            narrow(row, word[7] + ((first + t) * width + begin) * 2, count, BFLOAT16)


def experts_down(p):
    """y of every pair.

    1 hidden [pairs, I], 2 first, 3 active experts, 4 weights int64 [E] (panels), 5 I, even, 6 D, 7 y [pairs, D].
    """
    word = carray(p, 8, np.int64)
    tasks = carray(at(word[3]), 1, np.int64)[0] * panels_of(word[6])
    panels, token_list, ahead = np.empty(1, np.int64), np.empty(GROUP, np.int64), np.empty(2, np.int64)
    result = np.empty((GROUP, PANEL_ROWS), np.float32)
    task = draw(word.ctypes.data)
    while task < tasks:
        following = draw(word.ctypes.data)
        ahead[0] = panel_of_task(min(following, tasks - 1), word[3], word[4], word[6], word[5])
        ahead[1] = ahead[0] + min(panel_bytes(word[5]), BLOCK_PAIRS * PAIR_BYTES)
        down_task(word, task, panels, token_list, result, ahead)
        task = following
