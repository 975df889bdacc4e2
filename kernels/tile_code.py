"""Matrix tiles (AMX): the machine's own product of 16 x 32 bfloat16 weights with 32 x 16 bfloat16 tokens.

A tile register holds 16 rows of 64 bytes.  Weights are the left operand, loaded as they lie (16 plain rows, 32 numbers
of each) or laid tile behind tile (`lay_tiles`) where they pass again and again: rows that begin at no multiple of 64,
as in most files, make a product a quarter slower.  Tokens are the right one and must be laid in panels first: a panel
holds up to 16 tokens, row i of it the numbers 2 i and 2 i + 1 of each (`pack_panel`).  The result is 16 weight rows x
16 tokens in float32.  Two weight tiles meet one or two panels, so at most four results stand in registers 0 - 3,
weights in 4 and 5, panels in 6 and 7.

Each number of a result adds its products along the width in one fixed order, whoever stands beside it, so a token's
numbers do not depend on its company.  The machine flushes denormal numbers to zero; NaN and infinity stay.

Rejected: oneDNN's packed weights (a second form of every weight, half of the memory's speed for one token); prefetch of
all the next rows (measured slower: the machine follows the 32 rows of two tiles by itself once it has seen them begin).
Addresses are int64, steps are bytes.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from bgmpi.kernels.emit import (
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
    Bfloat16,
    element_at,
    exp_lanes,
    first_lanes,
    in_strips,
    load_lanes,
    pointer_to,
    prefetch,
    splat,
    store_lanes,
    turn_lanes,
)

#: Rows and tokens of a tile; numbers of the width that one tile covers; bytes of a tile and of the registers' shapes.
TILE, DEEP, TILE_BYTES, SHAPE_BYTES = 16, 32, 1024, 64
_WEIGHTS, _PANELS = (4, 5), (6, 7)


def compiled_for_tiles() -> bool:
    """Say whether kernels are compiled for a machine with bfloat16 tiles (and vectors that round to bfloat16)."""
    features = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
    return {"+amx-tile", "+amx-bf16", "+avx512bf16", "+avx512bw", "+avx512vl"} <= set(features)


def shapes() -> bytes:
    """Return the registers' shapes for panels of 0, 1 .. 16 tokens, `SHAPE_BYTES` each (palette 1)."""
    table = bytearray()
    for tokens in range(TILE + 1):
        columns = [4 * tokens if register not in _WEIGHTS else 2 * DEEP for register in range(8)]
        widths = b"".join(number.to_bytes(2, "little") for number in columns)
        table += bytes([1]) + bytes(15) + widths + bytes(16) + bytes([TILE] * 8) + bytes(8)
    return bytes(table)


def _tile(builder: Any, deed: str, *args: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{deed}"), list(args))


@intrinsic  # type: ignore[untyped-decorator]
def shape_tiles(typing: Any, shape: Any) -> Any:
    """Give this thread's tile registers the shape at this address (see `shapes`)."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _tile(builder, "ldtilecfg", pointer_to(builder, args[0], I8))
        return context.get_dummy_value()

    return types.void(types.int64), code


@intrinsic  # type: ignore[untyped-decorator]
def release_tiles(typing: Any) -> Any:
    """Let go of the tile registers, so that the system need not save them."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _tile(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), code


def _emit_product(builder: Any, panels: int, args: Any) -> None:
    low, high, row_step, tile_step, panel, panel_bytes, panel_step, deep, out, ahead = args
    results = [(r + 2 * p, r, p) for p in range(panels) for r in range(2)]  # register, which weights, which panel
    for register, _, _ in results:
        _tile(builder, "tilezero", I8(register))
    with cgutils.for_range(builder, deep, intp=I64) as loop:
        column = builder.mul(loop.index, tile_step)
        line = builder.mul(loop.index, builder.mul(panel_step, I64(DEEP // 2)))

        def load(register: int, base: Any, offset: Any, step: Any) -> None:
            _tile(builder, "tileloadd64", I8(register), pointer_to(builder, builder.add(base, offset), I8), step)

        load(_PANELS[0], panel, line, panel_step)
        load(_WEIGHTS[0], low, column, row_step)
        if panels == 2:
            load(_PANELS[1], builder.add(panel, panel_bytes), line, panel_step)
        load(_WEIGHTS[1], high, column, row_step)
        for register, r, p in sorted(results, key=lambda result: result[1]):
            _tile(builder, "tdpbf16ps", I8(register), I8(_WEIGHTS[r]), I8(_PANELS[p]))
    for begin in (0, 64):  # the memory would rest while the results are rounded and stored
        for base in (low, high):
            for r in range(TILE):
                row = builder.add(builder.add(base, ahead), builder.mul(row_step, I64(r)))
                prefetch(builder, builder.add(row, I64(begin)))
    for register, _, _ in results:
        target = pointer_to(builder, builder.add(out, I64(TILE_BYTES * register)), I8)
        _tile(builder, "tilestored64", I8(register), target, I64(4 * TILE))


def make_product(panels: int) -> Any:
    """Make `product(low, high, row_step, tile_step, panel, panel_bytes, panel_step, deep, out, ahead)`.

    low, high: addresses of the first tiles of 16 weight rows each, tile_step from the next along the width; panel: the
    first of `panels` (1 or 2) panels that lie panel_bytes apart and have rows of panel_step bytes; deep: tiles along
    the width.  out: tiles of float32 [16 rows, 16 tokens], the first panel's low and high rows, then the second's.
    ahead: how many bytes behind these rows the next ones lie.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def product(
        typing: Any, low: Any, high: Any, row_step: Any, tile_step: Any, panel: Any, panel_bytes: Any, panel_step: Any,
        deep: Any, out: Any, ahead: Any,
    ) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _emit_product(builder, panels, args)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10), code

    return product


@intrinsic  # type: ignore[untyped-decorator]
def lay_tiles(typing: Any, low: Any, high: Any, row_step: Any, deep: Any, target: Any) -> Any:
    """Lay two times 16 weight rows of `deep` tiles as whole tiles at `target`: low, high, the next low, and so on."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        low, high, row_step, deep, target = args
        with cgutils.for_range(builder, deep, intp=I64) as loop:
            column = builder.mul(loop.index, I64(2 * DEEP))
            place = builder.add(target, builder.mul(loop.index, I64(2 * TILE_BYTES)))
            for number, base in enumerate((low, high)):
                for r in range(TILE):
                    row = builder.add(builder.add(base, column), builder.mul(row_step, I64(r)))
                    line = load_lanes(builder, row, I16, DEEP, None)
                    store_lanes(builder, line, builder.add(place, I64(TILE_BYTES * number + 2 * DEEP * r)), None)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), code


@intrinsic  # type: ignore[untyped-decorator]
def pack_panel(typing: Any, token_list: Any, width: Any, target: Any, tokens: Any) -> Any:
    """Lay `tokens` (1 - 16) bfloat16 rows of `width` numbers as a panel with rows of 4 * tokens bytes.

    token_list: 16 int64 addresses, of which those behind the last may be any row's.  Rows of the panel up to the next
    multiple of 16 are zero.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        token_list, width, target, tokens = args
        mask = first_lanes(builder, tokens, LANES)
        pairs = ir.VectorType(I32, LANES)
        at = [pointer_to(builder, element_at(builder, token_list, I64(t), 8), I64) for t in range(TILE)]
        sources = [builder.load(address) for address in at]

        def strip(begin: Any, part: Any) -> None:
            rows = [load_lanes(builder, element_at(builder, source, begin, 2), I16, DEEP, part) for source in sources]
            first = builder.mul(builder.udiv(begin, I64(2)), builder.mul(tokens, I64(4)))
            for number, row in enumerate(turn_lanes(builder, [builder.bitcast(row, pairs) for row in rows])):
                offset = builder.add(first, builder.mul(tokens, I64(4 * number)))
                store_lanes(builder, row, builder.add(target, offset), mask)

        in_strips(builder, width, DEEP, strip)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), code


def _rounded(builder: Any, wide: Any) -> Any:
    """Round 16 float32 numbers to nearest even as bfloat16, held as integers; a denormal becomes zero, as in tiles."""
    return builder.bitcast(builder.fptrunc(wide, ir.VectorType(Bfloat16(), LANES)), ir.VectorType(I16, LANES))


def _pair(builder: Any, even: Any, odd: Any) -> Any:
    """Round two float32 vectors and lay them lane by lane beside each other, as a panel's row has them."""
    whole = ir.VectorType(I32, LANES)
    low, high = (builder.zext(_rounded(builder, part), whole) for part in (even, odd))
    return builder.or_(low, builder.shl(high, ir.Constant(whole, [16] * LANES)))


def _result_row(builder: Any, tile: Any, number: Any) -> Any:
    return load_lanes(builder, builder.add(tile, builder.mul(number, I64(4 * TILE))), F32, LANES, None)


@intrinsic  # type: ignore[untyped-decorator]
def expect_tokens(typing: Any, low: Any, step: Any, tokens: Any) -> Any:
    """Ask for the places that `store_tokens` will write, long before it does."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        low, step, tokens = args
        with cgutils.for_range(builder, tokens, intp=I64) as loop:
            prefetch(builder, builder.add(low, builder.mul(step, loop.index)), to_write=True)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), code


@intrinsic  # type: ignore[untyped-decorator]
def store_tokens(
    typing: Any, tiles: Any, low_bias: Any, high_bias: Any, low: Any, high: Any, rows: Any, step: Any, tokens: Any
) -> Any:
    """Write the results of one panel, a low tile and a high one behind it, as bfloat16.

    low[t, r] = tile[r, t] + bias[r] for r < rows (at most 16) and t < tokens, high likewise; low, high: addresses of
    the first token's numbers; step: bytes between tokens; low_bias, high_bias: addresses of 16 float32 numbers.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        tiles, low_bias, high_bias, low, high, rows, step, tokens = args
        pairs = []
        for number in range(2 * TILE):
            bias = element_at(builder, high_bias if number >= TILE else low_bias, I64(number % TILE), 4)
            added = splat(builder, builder.load(pointer_to(builder, bias, F32)), LANES)
            pairs.append(builder.fadd(_result_row(builder, tiles, I64(number)), added))
        turned = turn_lanes(builder, [_pair(builder, *pairs[n : n + 2]) for n in range(0, 2 * TILE, 2)])
        beside = builder.icmp_signed("==", high, builder.add(low, I64(2 * TILE)))
        whole = builder.and_(beside, builder.icmp_signed("==", tokens, I64(TILE)))
        with builder.if_else(builder.and_(whole, builder.icmp_signed(">=", rows, I64(TILE)))) as (then, otherwise):
            with then:
                for number, token in enumerate(turned):
                    store_lanes(builder, token, builder.add(low, builder.mul(step, I64(number))), None)
            with otherwise:
                _store_halves(builder, turned, (low, high), rows, step, tokens)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), code


def _store_halves(builder: Any, turned: list[Any], targets: tuple[Any, Any], rows: Any, step: Any, tokens: Any) -> None:
    """Store the low and the high 16 numbers of each token apart: of `tokens` tokens, `rows` numbers each."""
    mask, half = first_lanes(builder, rows, LANES), ir.VectorType(I16, LANES)
    room = cgutils.alloca_once(builder, ir.ArrayType(turned[0].type, TILE))
    for number, token in enumerate(turned):
        builder.store(token, builder.gep(room, [I32(0), I32(number)]))
    with cgutils.for_range(builder, tokens, intp=I64) as loop:
        token = builder.load(builder.gep(room, [I32(0), loop.index]))
        for first, target in zip((0, LANES // 2), targets, strict=True):
            lanes = ir.Constant(ir.VectorType(I32, LANES // 2), list(range(first, first + LANES // 2)))
            part = builder.bitcast(builder.shuffle_vector(token, token, lanes), half)
            store_lanes(builder, part, builder.add(target, builder.mul(step, loop.index)), mask)


@intrinsic  # type: ignore[untyped-decorator]
def store_gated(typing: Any, gate: Any, up: Any, target: Any, tokens: Any) -> Any:
    """Write silu(gate) * up of two result tiles, rounded to bfloat16, as 8 rows of a panel of `tokens` tokens."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        gate, up, target, tokens = args
        mask = first_lanes(builder, tokens, LANES)
        one = ir.Constant(ir.VectorType(F32, LANES), [1.0] * LANES)

        def gated(number: Any) -> Any:
            g, u = _result_row(builder, gate, number), _result_row(builder, up, number)
            return builder.fmul(builder.fdiv(g, builder.fadd(one, exp_lanes(builder, builder.fneg(g)))), u)

        with cgutils.for_range(builder, I64(TILE // 2), intp=I64) as loop:
            even = builder.mul(loop.index, I64(2))
            pair = _pair(builder, gated(even), gated(builder.add(even, I64(1))))
            row = builder.add(target, builder.mul(loop.index, builder.mul(tokens, I64(4))))
            store_lanes(builder, pair, row, mask)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), code
