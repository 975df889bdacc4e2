"""The softmax of queries in lanes: scores of a fold become shares, each lane for itself (see `lane_code`).

A fold of the softmax is two passes over a panel's rows: the largest score of each lane, then two to the power of what
lies below it.  Both run in four chains (row 4 i + k belongs to chain k), so no row waits for the one before, and what a
lane gets is fixed by the rows alone.  What a lane does not see has share zero; padding is never seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from bgmpi.kernels.emit import I32, I64, LANES, element_at, fma, load_lanes, splat, store_lanes
from bgmpi.kernels.lane_code import NUMBERS, ROW, VECTOR, load_row

#: 2 ** x for |x| <= 1/2 to 3e-9: the polynomial through its Chebyshev points, highest power first.
_POWERS = (0.00015461445, 0.0013400428, 0.009618057, 0.055503272, 0.2402265092, 0.6931472067, 1.0)


def _every(number: float) -> Any:
    return ir.Constant(VECTOR, [number] * LANES)


def _larger(builder: Any, x: Any, least: Any) -> Any:
    """Return x where it is larger, else `least`; a NaN in x is passed over."""
    return builder.select(builder.fcmp_ordered(">", x, least), x, least)


def _power_of_two(builder: Any, x: Any) -> Any:
    """2 ** x for x <= 0 to within 2 units in the last place; 2 ** -126 for all below; NaN stays NaN."""
    least = _every(-126.0)
    near = builder.select(builder.fcmp_ordered("<", x, least), least, x)
    rint = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(VECTOR, [VECTOR]), f"llvm.rint.v{LANES}f32"
    )
    whole = builder.call(rint, [near])
    rest = builder.fsub(near, whole)
    power = _every(_POWERS[0])
    for factor in _POWERS[1:]:
        power = fma(builder, power, rest, _every(factor))
    exponent = builder.shl(builder.fptosi(whole, NUMBERS), ir.Constant(NUMBERS, [23] * LANES))
    return builder.bitcast(builder.add(builder.bitcast(power, NUMBERS), exponent), VECTOR)


def _four_rows(
    builder: Any, rows: Any, empty: Any, deed: Callable[[Any], list[Any]], fold: Callable[[Any, Any], Any]
) -> Any:
    """Fold what deed(first row) returns for each four of `rows` rows, in four chains; then fold the chains."""
    chains = [cgutils.alloca_once(builder, VECTOR) for _ in range(4)]
    for chain in chains:
        builder.store(empty, chain)
    with cgutils.for_range(builder, builder.udiv(rows, I64(4)), intp=I64) as loop:
        for chain, found in zip(chains, deed(builder.mul(loop.index, I64(4))), strict=True):
            builder.store(fold(found, builder.load(chain)), chain)
    first, second, third, fourth = (builder.load(chain) for chain in chains)
    return fold(fold(first, second), fold(third, fourth))


def _paired(builder: Any, even: Any, odd: Any) -> tuple[Any, Any, Any]:
    """Round two vectors of numbers that are not negative to bfloat16 -> pairs of them, and what they have become."""
    half, high = ir.Constant(NUMBERS, [0x8000] * LANES), ir.Constant(NUMBERS, [0xFFFF0000] * LANES)
    sixteen = ir.Constant(NUMBERS, [16] * LANES)
    low, top = (builder.and_(builder.add(builder.bitcast(x, NUMBERS), half), high) for x in (even, odd))
    cells = builder.bitcast(builder.or_(builder.lshr(low, sixteen), top), VECTOR)
    return cells, builder.bitcast(low, VECTOR), builder.bitcast(top, VECTOR)


def _emit_weigh(builder: Any, masked: bool, pairs: bool, args: Any) -> None:
    scores, rows, state, factor, seen, window, begin = args
    best_at, total_at, shrink_at = (builder.add(state, I64(ROW * number)) for number in range(3))
    factors, best, zero = splat(builder, factor, LANES), load_row(builder, best_at), _every(0.0)
    last, reach = load_lanes(builder, seen, I32, LANES, None), splat(builder, builder.trunc(window, I32), LANES)

    def rows_from(first: Any) -> list[tuple[Any, Any]]:
        numbers = [builder.add(first, I64(number)) for number in range(4)]
        return [(row, load_row(builder, element_at(builder, scores, row, ROW))) for row in numbers]

    def if_visible(row: Any, value: Any, otherwise: Any) -> Any:
        if not masked:
            return value
        token = splat(builder, builder.trunc(builder.add(begin, row), I32), LANES)
        return builder.select(builder.icmp_unsigned("<", builder.sub(last, token), reach), value, otherwise)

    def highest(first: Any) -> list[Any]:
        return [if_visible(row, score, _every(float("-inf"))) for row, score in rows_from(first)]

    top = _four_rows(builder, rows, best, highest, lambda x, least: _larger(builder, x, least))
    shift = builder.fneg(builder.fmul(top, factors))

    def shares(first: Any) -> list[Any]:
        found = [
            if_visible(row, _power_of_two(builder, fma(builder, score, factors, shift)), zero)
            for row, score in rows_from(first)
        ]
        lines = [(builder.add(first, I64(number)), share) for number, share in enumerate(found)]
        if pairs:
            (one, *rounded), (other, *more) = (_paired(builder, *found[n : n + 2]) for n in (0, 2))
            half = builder.udiv(first, I64(2))
            lines, found = [(half, one), (builder.add(half, I64(1)), other)], [*rounded, *more]
        for row, line in lines:
            store_lanes(builder, line, element_at(builder, scores, row, ROW), None)
        return found

    added = _four_rows(builder, rows, zero, shares, builder.fadd)
    shrunk = _power_of_two(builder, fma(builder, best, factors, shift))
    shrink = builder.select(builder.fcmp_ordered(">", top, best), shrunk, _every(1.0))
    store_lanes(builder, top, best_at, None)
    store_lanes(builder, fma(builder, load_row(builder, total_at), shrink, added), total_at, None)
    store_lanes(builder, shrink, shrink_at, None)


def make_weigh(masked: bool, pairs: bool) -> Any:
    """Make `weigh(scores, rows, state, factor, seen, window, begin)`: turn one panel of scores into shares.

    scores: `rows` rows, a multiple of 4; state: three rows, of which `best` (the largest score so far) and `total` (sum
    of shares) are renewed, and `shrink` becomes what gathered values must be multiplied with; share = 2 ** (factor *
    (score - best)).  masked: row i, token begin + i, is seen by lane q if 0 <= seen[q] - begin - i < window; seen: 16
    int32, the last token that each lane sees.  pairs: shares are rounded to bfloat16, the sum is that of the rounded
    ones, and two rows become one of pairs.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def weigh(
        typing: Any, scores: Any, rows: Any, state: Any, factor: Any, seen: Any, window: Any, begin: Any
    ) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _emit_weigh(builder, masked, pairs, args)
            return context.get_dummy_value()

        integer = types.int64
        return types.void(integer, integer, integer, types.float32, integer, integer, integer), code

    return weigh
