"""The inner loop of bfloat16 products on a machine that adds pairs of products (vdpbf16ps), and what feeds it.

Lanes are rows of the weight: one number of the result is one lane, to which pair after pair of columns is added, so no
lanes are summed at the end and the order of a sum is the order of the columns, whoever shares the call.  For that the
weight lies in panels: `PANEL_ROWS` rows turned crosswise, pair of columns by pair of columns.  A panel is then one
stretch of memory, read from its begin to its end, as fast as memory gives it where a single token passes.

Rejected: turning panels from plain rows whenever they are used.  Hundreds of tokens hide that, a few do not.

Addresses are int64, steps are bytes.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from bgmpi.kernels.emit import (
    F32,
    I32,
    I64,
    LANES,
    Bfloat16,
    in_strips,
    load_lanes,
    pointer_to,
    prefetch,
    splat,
    store_lanes,
)
from bgmpi.kernels.vector_code import compiled_for_pairs

#: Vectors and rows of a panel; bytes of one pair of its columns.
VECTORS = 4
PANEL_ROWS = VECTORS * LANES
PAIR_BYTES = 4 * PANEL_ROWS
#: Tokens of the largest tile: with the panel's vectors they fill the machine's registers.
TILE_TOKENS = 6


def _only_for_pairs(builder: Any, emit: Any) -> None:
    """Emit the code where the machine has it, a trap elsewhere."""
    if compiled_for_pairs():
        emit()
    else:
        trap = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), []), "llvm.trap")
        builder.call(trap, [])


def _emit_tile(builder: Any, tokens: int, args: Any) -> None:
    panel, pairs, token_list, out, out_step, fresh, ahead, ahead_step = args
    whole, halves = ir.VectorType(F32, LANES), ir.VectorType(Bfloat16(), 2 * LANES)
    kind = ir.FunctionType(whole, [whole, halves, halves])
    product = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
    token_at = [
        builder.load(pointer_to(builder, builder.add(token_list, I64(8 * t)), I64)) for t in range(tokens)
    ]
    starts = builder.icmp_signed("!=", fresh, I64(0))
    totals = [[cgutils.alloca_once(builder, whole) for _ in range(VECTORS)] for _ in range(tokens)]
    places = [
        [builder.add(out, builder.add(builder.mul(out_step, I64(t)), I64(4 * LANES * v))) for v in range(VECTORS)]
        for t in range(tokens)
    ]
    for t in range(tokens):
        for v in range(VECTORS):
            before = load_lanes(builder, places[t][v], F32, LANES, None)
            builder.store(builder.select(starts, ir.Constant(whole, None), before), totals[t][v])
    with cgutils.for_range(builder, pairs, intp=I64) as loop:
        offset = builder.mul(loop.index, I64(PAIR_BYTES))
        rows = []
        for v in range(VECTORS):
            place = builder.add(builder.add(panel, offset), I64(4 * LANES * v))
            pointer = pointer_to(builder, place, ir.VectorType(I32, LANES))
            rows.append(builder.bitcast(builder.load(pointer, align=64), halves))
        prefetch(builder, builder.add(ahead, builder.mul(loop.index, ahead_step)))
        for t in range(tokens):
            address = builder.add(token_at[t], builder.mul(loop.index, I64(4)))
            pair = builder.load(pointer_to(builder, address, I32), align=2)
            token = builder.bitcast(splat(builder, pair, LANES), halves)
            for v in range(VECTORS):
                builder.store(builder.call(product, [builder.load(totals[t][v]), rows[v], token]), totals[t][v])
    for t in range(tokens):
        for v in range(VECTORS):
            store_lanes(builder, builder.load(totals[t][v]), places[t][v], None)


def make_tile(tokens: int) -> Any:
    """Make `tile(panel, pairs, token_list, out, out_step, fresh, ahead, ahead_step)`.

    out[t, r] += row r of the panel . token t.  panel: address, a multiple of 64, of `pairs` pairs of columns;
    token_list: address of `tokens` int64 addresses of bfloat16 columns; out: float32 [tokens, PANEL_ROWS], out_step
    bytes between tokens; fresh: not 0 where the sums begin at zero.  One line is asked for with every pair of columns:
    from address `ahead` on, ahead_step apart.  Not to be run where `compiled_for_pairs` says no.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def tile(
        typing: Any, panel: Any, pairs: Any, token_list: Any, out: Any, out_step: Any, fresh: Any,
        ahead: Any, ahead_step: Any,
    ) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _only_for_pairs(builder, lambda: _emit_tile(builder, tokens, args))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), code

    return tile


def _shuffled(builder: Any, first: Any, second: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, LANES), lanes))


def _turned(builder: Any, rows: list[Any]) -> list[Any]:
    """Turn 16 vectors of 16 numbers crosswise: within quarters first, then the quarters."""
    quarters = range(0, LANES, 4)
    low = [lane for q in quarters for lane in (q, LANES + q, q + 1, LANES + q + 1)]
    high = [lane for q in quarters for lane in (q + 2, LANES + q + 2, q + 3, LANES + q + 3)]
    twos = [_shuffled(builder, rows[i], rows[i + 1], lanes) for i in range(0, LANES, 2) for lanes in (low, high)]
    low = [lane for q in quarters for lane in (q, q + 1, LANES + q, LANES + q + 1)]
    high = [lane for q in quarters for lane in (q + 2, q + 3, LANES + q + 2, LANES + q + 3)]
    fours = [
        _shuffled(builder, twos[i + half], twos[i + half + 2], lanes)
        for i in range(0, LANES, 4) for half in range(2) for lanes in (low, high)
    ]

    def lanes_of(a: int, b: int) -> list[int]:
        """Quarters a and b of both vectors."""
        return [base + 4 * q + lane for base in (0, LANES) for q in (a, b) for lane in range(4)]

    result: list[Any] = [None] * LANES
    for j in range(4):
        one, two, three, four = fours[j::4]
        for q, lanes in ((0, lanes_of(0, 1)), (2, lanes_of(2, 3))):
            left, right = _shuffled(builder, one, two, lanes), _shuffled(builder, three, four, lanes)
            result[4 * q + j] = _shuffled(builder, left, right, lanes_of(0, 2))
            result[4 * (q + 1) + j] = _shuffled(builder, left, right, lanes_of(1, 3))
    return result


def _emit_turn(builder: Any, args: Any) -> None:
    row, row_step, last, pairs, panel = args
    starts = []
    for r in range(LANES):
        place = builder.select(builder.icmp_signed("<", last, I64(r)), last, I64(r))
        starts.append(builder.add(row, builder.mul(row_step, place)))

    def turn(begin: Any, mask: Any) -> None:
        offset = builder.mul(begin, I64(4))
        values = [load_lanes(builder, builder.add(start, offset), I32, LANES, mask) for start in starts]
        target = builder.add(panel, builder.mul(begin, I64(PAIR_BYTES)))
        for c, value in enumerate(_turned(builder, values)):
            store_lanes(builder, value, builder.add(target, I64(c * PAIR_BYTES)), None)

    in_strips(builder, pairs, LANES, turn)


@intrinsic  # type: ignore[untyped-decorator]
def turn_rows(typing: Any, row: Any, row_step: Any, last: Any, pairs: Any, panel: Any) -> Any:
    """Lay 16 rows from address `row` on crosswise into one vector of a panel; rows behind `last` repeat that one.

    panel: address of that vector in the first pair.  Writes up to a multiple of 16 pairs, behind the last one zeros.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _only_for_pairs(builder, lambda: _emit_turn(builder, args))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), code
