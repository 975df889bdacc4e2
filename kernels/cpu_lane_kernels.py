# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""One attention task with queries in lanes: up to QUERIES of them over any stretch of one sequence's pages.

The queries are the heads of one block of some tokens, which need not be neighbours and may be of many sequences, as
long as their pages are the same over this stretch.  The softmax is folded every FOLD tokens, counted from the begin of
the stretch; a query's numbers depend on the stretch and on what it may see of it, not on who else is in the task.

Of bfloat16 pages, on a machine with the pair product, shares are rounded to bfloat16 before they meet the values, as
in torch's own attention, and the sum that divides is that of the rounded ones; otherwise all is float32.

The words are those of `cpu_attention_kernels.attend`; `room` says where the scratch of this thread has what.  How
kernels are written stands in `cpu_dot_kernels`, the vector code in `lane_code` and `lane_softmax_code`.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from bgmpi.kernels.emit import LANES
from bgmpi.kernels.lane_code import (
    ROW,
    STATE,
    has_pairs,
    make_lane_mix,
    make_scores,
    pair_rows,
    unpack_panel,
    widen_rows,
)
from bgmpi.kernels.lane_softmax_code import make_weigh
from bgmpi.kernels.tile_code import pack_panel
from bgmpi.kernels.vector_code import at, narrow, widen

scores_1, scores_2, scores_4 = (make_scores(panels, False) for panels in (1, 2, 4))
pair_scores_1, pair_scores_2, pair_scores_4 = (make_scores(panels, True) for panels in (1, 2, 4))
mix_1, mix_2, mix_4 = (make_lane_mix(panels, False) for panels in (1, 2, 4))
pair_mix_1, pair_mix_2, pair_mix_4 = (make_lane_mix(panels, True) for panels in (1, 2, 4))
weigh_seen, weigh_whole = make_weigh(True, False), make_weigh(False, False)
pair_weigh_seen, pair_weigh_whole = make_weigh(True, True), make_weigh(False, True)

#: Panels that pass the cached tokens together, the queries in them, and tokens between two folds of the softmax.
PANELS = 4
QUERIES = PANELS * LANES
FOLD = 64
#: Columns of values are padded to a multiple of this, and tokens of a fold too: the largest tile.
TILE = 8
#: What the scratch of a thread holds, see `rooms`: panels of queries, scores and results; best, total and shrink of
#: each panel; addresses of the keys of two folds, and of 16 rows; the last token that each lane sees; float32 values or
#: pairs of bfloat16; keys and queries as float32; rows of results; a factor a lane; addresses of the float32 keys.
(
    QUERY_PANELS, SCORE_PANELS, RESULT_PANELS, STATES, KEY_LISTS, ROW_LIST, LAST_SEEN, VALUES, WIDE_KEYS, RESULT_ROWS,
    FACTORS, WIDE_KEY_LIST,
) = range(12)


@njit
def scores(panels, pairs, keys, tokens, panel, panel_step, cells, out, out_step, ahead, ahead_step):
    """Scores of `tokens` keys, a multiple of TILE, with any number of panels."""
    while panels > 0:
        some = 4 if panels >= 4 else min(panels, 2)
        if pairs:
            if some == 4:
                pair_scores_4(keys, tokens, panel, panel_step, cells, out, out_step, ahead, ahead_step)
            elif some == 2:
                pair_scores_2(keys, tokens, panel, panel_step, cells, out, out_step, ahead, ahead_step)
            else:
                pair_scores_1(keys, tokens, panel, panel_step, cells, out, out_step, ahead, ahead_step)
        elif some == 4:
            scores_4(keys, tokens, panel, panel_step, cells, out, out_step, ahead, ahead_step)
        elif some == 2:
            scores_2(keys, tokens, panel, panel_step, cells, out, out_step, ahead, ahead_step)
        else:
            scores_1(keys, tokens, panel, panel_step, cells, out, out_step, ahead, ahead_step)
        panels, panel, out = panels - some, panel + some * panel_step, out + some * out_step


@njit
def mix(panels, pairs, values, step, rows, share, share_step, shrink, out, out_step, width):
    """Add `rows` rows of values to what any number of panels have gathered."""
    while panels > 0:
        some = 4 if panels >= 4 else min(panels, 2)
        if pairs:
            if some == 4:
                pair_mix_4(values, step, rows, share, share_step, shrink, out, out_step, width)
            elif some == 2:
                pair_mix_2(values, step, rows, share, share_step, shrink, out, out_step, width)
            else:
                pair_mix_1(values, step, rows, share, share_step, shrink, out, out_step, width)
        elif some == 4:
            mix_4(values, step, rows, share, share_step, shrink, out, out_step, width)
        elif some == 2:
            mix_2(values, step, rows, share, share_step, shrink, out, out_step, width)
        else:
            mix_1(values, step, rows, share, share_step, shrink, out, out_step, width)
        panels, share, out = panels - some, share + some * share_step, out + some * out_step
        shrink += some * STATE


@njit
def weigh(panels, pairs, whole, shares, share_step, rows, state, factor, seen, window, first):
    """Turn the scores of any number of panels into shares; whole: all lanes see all rows."""
    for _ in range(panels):
        if pairs and whole:
            pair_weigh_whole(shares, rows, state, factor, 0, 0, 0)
        elif pairs:
            pair_weigh_seen(shares, rows, state, factor, seen, window, first)
        elif whole:
            weigh_whole(shares, rows, state, factor, 0, 0, 0)
        else:
            weigh_seen(shares, rows, state, factor, seen, window, first)
        shares, state, seen = shares + share_step, state + STATE, seen + 4 * LANES


@njit
def up(number, step):
    """Round up to a multiple of step."""
    return (number + step - 1) // step * step


@njit
def rooms(key_width, value_width):
    """Where the scratch of a thread has what, in bytes from its begin, and last how much of it there is."""
    sizes = (
        PANELS * ROW * up(key_width, LANES), PANELS * ROW * FOLD, PANELS * ROW * up(value_width, TILE),
        PANELS * STATE, 16 * FOLD, 8 * LANES, 4 * QUERIES, FOLD * value_step(value_width),
        4 * max(FOLD, LANES) * key_width, 4 * LANES * value_width, ROW, 8 * FOLD,
    )
    begin = np.zeros(len(sizes) + 1, np.int64)
    for number, size in enumerate(sizes):
        begin[number + 1] = begin[number] + up(size, 64)
    return begin


@njit
def value_step(value_width):
    """Bytes between two tokens' float32 values: one line more than they need, lest they all fall into one set."""
    return 4 * up(value_width, LANES) + 64


@njit
def place_of(word, sequence, token):
    """Where a cached token of a sequence lies, and how many of its page stand from there on."""
    slot = token % word[13]
    page = carray(at(word[11] + 4 * (sequence * word[12] + token // word[13])), 1, np.int32)[0]
    return word[5] + page * word[6] + slot * word[10], word[13] - slot


@njit
def in_pairs(word):
    """Whether scores are products of bfloat16 pairs."""
    return has_pairs() and word[24] == 1 and word[22] % 2 == 0


@njit
def pack_queries(word, room, rows, head, heads):
    """Lay the queries of a task in panels, and note which token each lane sees last; idle lanes copy the first."""
    width, size = word[22], word[25]
    address = carray(at(room[ROW_LIST]), LANES, np.int64)
    seen = carray(at(room[LAST_SEEN]), QUERIES, np.int32)
    queries = len(rows) * heads
    for first in range(0, queries, LANES):
        for lane in range(LANES):
            q = first + lane if first + lane < queries else 0
            source = word[2] + rows[q // heads, 0] * word[3] + (head + q % heads) * width * size
            seen[first + lane] = rows[q // heads, 1]
            if in_pairs(word):
                address[lane] = source
            else:
                address[lane] = room[WIDE_KEYS] + 4 * lane * width
                widen(source, address[lane], width, word[24])
        cells = width // 2 if in_pairs(word) else width
        pack_panel(room[ROW_LIST], 2 * cells, room[QUERY_PANELS] + first // LANES * ROW * up(word[22], LANES), LANES)


@njit
def list_keys(word, sequence, block, first, end, keys):
    """List where the keys of up to FOLD cached tokens from `first` on are, and return how many there are.

    Behind them, up to the next multiple of TILE, is the last one again.
    """
    token, after = first, min(first + FOLD, end)
    while token < after:
        place, left = place_of(word, sequence, token)
        place += block * word[7]
        for number in range(token - first, min(token + left, after) - first):
            keys[number] = place
            place += word[10]
        token += left
    for number in range(after - first, up(after - first, TILE)):
        keys[number] = keys[after - first - 1]
    return after - first


@njit
def lane_fold(word, room, block, keys, ahead, panels, first, count, factor, least, most):
    """Let all panels see the cached tokens of one fold.  least, most: the last tokens seen by any lane."""
    to_value, short, tokens = word[8] + block * (word[9] - word[7]), has_pairs() and word[24] == 1, up(count, TILE)
    step, share_step, sources = value_step(word[23]), ROW * FOLD, keys
    if short:
        pair_rows(keys, to_value, (count + 1) // 2, room[VALUES], step, word[23])
    else:
        widen_rows(keys, to_value, count, room[VALUES], step, word[23], word[24])
    if word[24] != 0 and not in_pairs(word):
        widen_rows(keys, 0, tokens, room[WIDE_KEYS], 4 * word[22], word[22], word[24])
        sources = room[WIDE_KEY_LIST]
    cells = word[22] // 2 if in_pairs(word) else word[22]
    scores(panels, in_pairs(word), sources, tokens, room[QUERY_PANELS], ROW * up(word[22], LANES), cells,
           room[SCORE_PANELS], share_step, ahead, to_value)
    window = word[30] if word[30] > 0 else np.int64(1 << 31) - 1
    whole = tokens == count and first + count - 1 <= least and first > most - window
    weigh(panels, short, whole, room[SCORE_PANELS], share_step, tokens, room[STATES], factor, room[LAST_SEEN],
          window, first)
    mix(panels, short, room[VALUES], step, (count + 1) // 2 if short else count, room[SCORE_PANELS], share_step,
        room[STATES] + 2 * ROW, room[RESULT_PANELS], ROW * up(word[23], TILE), word[23])


@njit
def keep_lanes(word, room, rows, task, scale):
    """Write what each query of a task got: its part, or the finished row."""
    block, ordinal, head, heads = task[5], task[6], task[7], task[8]
    width, size = word[23], word[25]
    target = carray(at(room[ROW_LIST]), LANES, np.int64)
    queries, scratch = len(rows) * heads, room[RESULT_ROWS]
    factors, whole = carray(at(room[FACTORS]), LANES, np.float32), rows[0, 2] < 0
    for first in range(0, queries, LANES):
        panel = room[RESULT_PANELS] + first // LANES * ROW * up(width, TILE)
        state = room[STATES] + first // LANES * STATE
        lanes = carray(at(state), (3, LANES), np.float32)
        for lane in range(LANES):
            factors[lane] = np.float32(1.0) / lanes[1, lane] if whole else np.float32(1.0)
            target[lane] = scratch + 4 * lane * width
            q = first + lane
            if q < queries and not whole:
                part = rows[q // heads, 2] + block * rows[q // heads, 3] + ordinal
                target[lane] = word[29] + 4 * (part * word[28] + head % word[28] + q % heads) * (width + 2)
                ends = carray(at(target[lane] + 4 * width), 2, np.float32)
                ends[0], ends[1] = lanes[0, lane] * scale, lanes[1, lane]
        unpack_panel(panel, room[FACTORS], width, room[ROW_LIST])
        if whole:
            for q in range(first, min(first + LANES, queries)):
                place = (rows[q // heads, 0] * word[27] + head + q % heads) * width * size
                narrow(scratch + 4 * (q - first) * width, word[4] + place, width, word[24])


@njit
def lane_task(word, room, task, listed, scale):
    """Let the listed rows of a task, and the heads of its block, see its stretch of cached tokens.

    task: first of the listed rows, how many, sequence whose pages they are, first and last + 1 cached token, head
    block, ordinal of this part among those of the stretch, first head, heads (of the block); listed int64 [n, 4]:
    token, last cached token that it sees, first part of the stretch for head block 0 or -1, parts from one head block
    to the next.
    """
    block, rows = task[5], listed[task[0] : task[0] + task[1]]
    panels = (len(rows) * task[8] + LANES - 1) // LANES
    pack_queries(word, room, rows, task[7], task[8])
    seen = carray(at(room[LAST_SEEN]), panels * LANES, np.int32)
    for q in range(panels * LANES):
        seen[q] = min(np.int64(seen[q]), task[4] - 1)
    states = carray(at(room[STATES]), (panels, 3, LANES), np.float32)
    states[:, 0], states[:, 1] = -np.inf, 0
    carray(at(room[RESULT_PANELS]), panels * LANES * up(word[23], TILE), np.float32)[:] = 0
    wide_keys = carray(at(room[WIDE_KEY_LIST]), FOLD, np.int64)
    for number in range(FOLD):
        wide_keys[number] = room[WIDE_KEYS] + 4 * number * word[22]
    factor = np.float32(scale * 1.4426950408889634)
    keys = carray(at(room[KEY_LISTS]), (2, FOLD), np.int64)
    count, now = list_keys(word, task[2], block, task[3], task[4], keys[0]), 0
    for first in range(task[3], task[4], FOLD):
        more = list_keys(word, task[2], block, first + FOLD, task[4], keys[1 - now]) if first + FOLD < task[4] else 0
        ahead = 1 - now if more == FOLD else now
        lane_fold(word, room, block, keys[now].ctypes.data, keys[ahead].ctypes.data, panels, first, count, factor,
                  seen.min(), seen.max())
        count, now = more, 1 - now
    keep_lanes(word, room, rows, task, scale)
