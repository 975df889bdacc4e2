"""Attention with queries in lanes: sixteen queries a vector, and each cached number spread over all of them.

Where many queries read the same cached tokens (the members of a group behind their prefix, the new tokens of a prompt,
the heads that share keys) attention is two matrix products.  With the queries of a product side by side in lanes no
sum runs across lanes: a score adds its products along the width, a result adds its values along the tokens, the
softmax takes the largest and the sum of each lane for itself.  So a query's numbers do not depend on its company, and a
NaN stays in its lane.

A panel holds 16 queries: row i of it is number i of each (float32), or numbers 2 i and 2 i + 1 of each (pairs of
bfloat16); 64 bytes a row.  Up to four panels pass the cached tokens together; then each cached number that is loaded
meets four vectors, and the arithmetic is the bound.  All sums are float32.  Pairs are the machine's own product
(vdpbf16ps): exact products, two a lane, in an order of its own; denormal numbers are zero to it.

Rejected: float32 shares against bfloat16 values, or shares as the sum of two bfloat16 numbers: both take twice the time
of rounded ones for the half of the work that is values, and what they save is less than the last rounding.
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
    I16,
    I32,
    I64,
    LANES,
    SIZE,
    Bfloat16,
    element_at,
    fma,
    for_each_kind,
    in_strips,
    load_lanes,
    load_wide,
    pointer_to,
    prefetch,
    splat,
    store_lanes,
    turn_lanes,
)
from bgmpi.kernels.vector_code import compiled_for_pairs

#: Bytes of one row of a panel, and of what is remembered of one: best, total and shrink of each lane.
ROW = 4 * LANES
STATE = 3 * ROW
VECTOR, NUMBERS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)


def tile_of(vectors: int) -> tuple[int, int]:
    """Return how many tokens of scores, and columns of values, pass so many panels in registers."""
    return (8, 8) if vectors < 3 else (4, 4)


def _vector_at(builder: Any, base: Any, step: Any, number: int) -> Any:
    return builder.add(base, builder.mul(step, I64(number)))


def load_row(builder: Any, address: Any) -> Any:
    return load_lanes(builder, address, F32, LANES, None)


def _loaded(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(pointer_to(builder, address, kind))


def _product(builder: Any, pairs: bool, total: Any, one: Any, other: Any) -> Any:
    """total + one * other, of float32 numbers or of pairs of bfloat16."""
    if not pairs:
        return fma(builder, one, other, total)
    cells = ir.VectorType(Bfloat16(), 2 * LANES)
    kind = ir.FunctionType(VECTOR, [VECTOR, cells, cells])
    product = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
    return builder.call(product, [total, builder.bitcast(one, cells), builder.bitcast(other, cells)])


def _trap(builder: Any) -> None:
    builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), []), "llvm.trap"), [])


def _tile(builder: Any, rows: int, vectors: int) -> list[list[Any]]:
    return [[cgutils.alloca_once(builder, VECTOR) for _ in range(vectors)] for _ in range(rows)]


def _emit_scores(builder: Any, vectors: int, pairs: bool, args: Any) -> None:
    keys, tokens, panel, panel_step, cells, out, out_step, ahead, ahead_step = args
    each = tile_of(vectors)[0]
    tile = _tile(builder, each, vectors)
    with cgutils.for_range(builder, builder.udiv(tokens, I64(each)), intp=I64) as turn:
        first = builder.mul(turn.index, I64(each))
        key_at = [
            _loaded(builder, element_at(builder, keys, builder.add(first, I64(t)), 8), I64) for t in range(each)
        ]
        soon = _loaded(builder, element_at(builder, ahead, first, 8), I64)
        for line in tile:
            for total in line:
                builder.store(ir.Constant(VECTOR, None), total)
        with cgutils.for_range(builder, cells, intp=I64) as loop:
            place = element_at(builder, soon, loop.index, 4 * each)
            for address in (place, builder.add(place, ahead_step)):
                prefetch(builder, address)
            row = element_at(builder, panel, loop.index, ROW)
            queries = [load_row(builder, _vector_at(builder, row, panel_step, v)) for v in range(vectors)]
            for line, address in zip(tile, key_at, strict=True):
                cell = _loaded(builder, element_at(builder, address, loop.index, 4), I32 if pairs else F32)
                key = splat(builder, cell, LANES)
                for total, query in zip(line, queries, strict=True):
                    builder.store(_product(builder, pairs, builder.load(total), key, query), total)
        for t, line in enumerate(tile):
            row = element_at(builder, out, builder.add(first, I64(t)), ROW)
            for v, total in enumerate(line):
                store_lanes(builder, builder.load(total), _vector_at(builder, row, out_step, v), None)


def _emit_mix(builder: Any, vectors: int, pairs: bool, args: Any) -> None:
    values, value_step, count, share, share_step, shrink, out, out_step, width = args
    each = tile_of(vectors)[1]
    tile = _tile(builder, each, vectors)
    shrinks = [load_row(builder, _vector_at(builder, shrink, I64(STATE), v)) for v in range(vectors)]
    with cgutils.for_range(builder, builder.udiv(builder.add(width, I64(each - 1)), I64(each)), intp=I64) as turn:
        first = builder.mul(turn.index, I64(each))
        base = element_at(builder, out, first, ROW)
        places = [
            [_vector_at(builder, builder.add(base, I64(ROW * w)), out_step, v) for v in range(vectors)]
            for w in range(each)
        ]
        for line, line_places in zip(tile, places, strict=True):
            for total, place, factor in zip(line, line_places, shrinks, strict=True):
                builder.store(builder.fmul(load_row(builder, place), factor), total)
        column = element_at(builder, values, first, 4)
        with cgutils.for_range(builder, count, intp=I64) as loop:
            row = element_at(builder, share, loop.index, ROW)
            shares = [load_row(builder, _vector_at(builder, row, share_step, v)) for v in range(vectors)]
            source = builder.add(column, builder.mul(loop.index, value_step))
            for w, line in enumerate(tile):
                value = splat(builder, _loaded(builder, builder.add(source, I64(4 * w)), I32 if pairs else F32), LANES)
                for total, factor in zip(line, shares, strict=True):
                    builder.store(_product(builder, pairs, builder.load(total), value, factor), total)
        for line, line_places in zip(tile, places, strict=True):
            for total, place in zip(line, line_places, strict=True):
                store_lanes(builder, builder.load(total), place, None)


def make_scores(vectors: int, pairs: bool) -> Any:
    """Make `scores(keys, tokens, panel, panel_step, cells, out, out_step, ahead, ahead_step)`.

    out[t] = key t . query, for every query of the panels.  keys: address of int64 addresses of `tokens` keys, a
    multiple of `tile_of`; panel: the first of `vectors` panels of `cells` rows; out: the first of as many panels, a row
    a token.  pairs: keys and panels are pairs of bfloat16; not to be run where `compiled_for_pairs` says no.  ahead:
    addresses of the rows that will be read next, as `keys` has them, and ahead_step bytes behind each there is another:
    both are asked for meanwhile.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def scores(
        typing: Any, keys: Any, tokens: Any, panel: Any, panel_step: Any, cells: Any, out: Any, out_step: Any,
        ahead: Any, ahead_step: Any,
    ) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            if compiled_for_pairs() or not pairs:
                _emit_scores(builder, vectors, pairs, args)
            else:
                _trap(builder)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), code

    return scores


def make_lane_mix(vectors: int, pairs: bool) -> Any:
    """Make `mix(values, value_step, rows, share, share_step, shrink, out, out_step, width)`.

    out[w] = out[w] * shrink + sum over j < rows, ascending, of share[j] * values[j, w], for `vectors` panels at once.
    values, share: float32, a row a token, or pairs of bfloat16, a row two tokens (see `make_scores`).  values are
    readable up to the next multiple of `tile_of` columns; so is out; shrink: a row every STATE bytes.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def mix(
        typing: Any, values: Any, value_step: Any, rows: Any, share: Any, share_step: Any, shrink: Any, out: Any,
        out_step: Any, width: Any,
    ) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            if compiled_for_pairs() or not pairs:
                _emit_mix(builder, vectors, pairs, args)
            else:
                _trap(builder)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), code

    return mix


@intrinsic  # type: ignore[untyped-decorator]
def has_pairs(typing: Any) -> Any:
    """Say whether kernels are compiled for a machine that adds pairs of bfloat16 products."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(ir.IntType(1), int(compiled_for_pairs()))

    return types.boolean(), code


@intrinsic  # type: ignore[untyped-decorator]
def unpack_panel(typing: Any, panel: Any, factor: Any, width: Any, target_list: Any) -> Any:
    """Write each lane of a float32 panel of `width` rows, times its factor, as a row of its own.

    factor: 16 float32 numbers; target_list: 16 int64 addresses, distinct or never read.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        panel, factor, width, target_list = args
        factors = load_row(builder, factor)
        targets = [_loaded(builder, element_at(builder, target_list, I64(q), 8), I64) for q in range(LANES)]

        def strip(begin: Any, mask: Any) -> None:
            at = [element_at(builder, panel, builder.add(begin, I64(number)), ROW) for number in range(LANES)]
            rows = [builder.fmul(load_row(builder, address), factors) for address in at]
            for target, row in zip(targets, turn_lanes(builder, rows), strict=True):
                store_lanes(builder, row, element_at(builder, target, begin, 4), mask)

        in_strips(builder, width, LANES, strip)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), code



@intrinsic  # type: ignore[untyped-decorator]
def widen_rows(typing: Any, sources: Any, ahead: Any, count: Any, target: Any, step: Any, width: Any, kind: Any) -> Any:
    """Copy rows of `width` numbers of this kind as float32.

    sources: address of `count` int64 addresses, `ahead` bytes before the rows; step: bytes between rows of the target.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sources, ahead, count, target, step, width, kind = args

        def emit(number: int) -> None:
            with cgutils.for_range(builder, count, intp=I64) as loop:
                source = _loaded(builder, element_at(builder, sources, loop.index, 8), I64)
                source, place = builder.add(source, ahead), builder.add(target, builder.mul(loop.index, step))

                def strip(begin: Any, mask: Any) -> None:
                    wide = load_wide(builder, element_at(builder, source, begin, SIZE[number]), number, 2 * LANES, mask)
                    store_lanes(builder, wide, element_at(builder, place, begin, 4), mask)

                in_strips(builder, width, 2 * LANES, strip)

        for_each_kind(builder, kind, emit)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), code


@intrinsic  # type: ignore[untyped-decorator]
def pair_rows(typing: Any, sources: Any, ahead: Any, pairs: Any, target: Any, step: Any, width: Any) -> Any:
    """Lay rows of `width` bfloat16 numbers two and two, number beside number (see `widen_rows`)."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sources, ahead, pairs, target, step, width = args
        with cgutils.for_range(builder, pairs, intp=I64) as loop:
            both = [
                builder.add(_loaded(builder, element_at(builder, sources, number, 8), I64), ahead)
                for number in (builder.mul(loop.index, I64(2)), builder.add(builder.mul(loop.index, I64(2)), I64(1)))
            ]
            place = builder.add(target, builder.mul(loop.index, step))

            def strip(begin: Any, mask: Any) -> None:
                even, odd = (
                    builder.zext(load_lanes(builder, element_at(builder, row, begin, 2), I16, LANES, mask), NUMBERS)
                    for row in both
                )
                cells = builder.or_(even, builder.shl(odd, ir.Constant(NUMBERS, [16] * LANES)))
                store_lanes(builder, builder.bitcast(cells, VECTOR), element_at(builder, place, begin, 4), mask)

            in_strips(builder, width, LANES, strip)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), code
