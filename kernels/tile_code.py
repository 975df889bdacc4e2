"""Matrix tiles (AMX): the machine's own product of 16 x 32 bfloat16 weights with 32 x 16 bfloat16 tokens.

A tile register holds 16 rows of 64 bytes.  Weights are the left operand, loaded as they lie: 16 plain rows, 32 numbers
of each.  Tokens are the right one and must be laid in panels first: a panel holds up to 16 tokens, row i of it the
numbers 2 i and 2 i + 1 of each (`pack_panel`).  The result is 16 weight rows x 16 tokens in float32.  Two weight tiles
meet one or two panels, so at most four results stand in registers 0 - 3, weights in 4 and 5, panels in 6 and 7.

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
    BFLOAT16,
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
    element_at,
    exp_lanes,
    first_lanes,
    in_strips,
    load_lanes,
    narrow_lanes,
    pointer_to,
    prefetch,
    store_lanes,
)

#: Rows and tokens of a tile; numbers of the width that one tile covers; bytes of a tile and of the registers' shapes.
TILE, DEEP, TILE_BYTES, SHAPE_BYTES = 16, 32, 1024, 64
_WEIGHTS, _PANELS = (4, 5), (6, 7)


def compiled_for_tiles() -> bool:
    """Say whether kernels are compiled for a machine with bfloat16 tiles."""
    features = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
    return {"+amx-tile", "+amx-bf16"} <= set(features)


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
    low, high, row_step, panel, panel_bytes, panel_step, deep, out, ahead = args
    results = [(r + 2 * p, r, p) for p in range(panels) for r in range(2)]  # register, which weights, which panel
    for register, _, _ in results:
        _tile(builder, "tilezero", I8(register))
    with cgutils.for_range(builder, deep, intp=I64) as loop:
        column = builder.mul(loop.index, I64(2 * DEEP))
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
    """Make `product(low, high, row_step, panel, panel_bytes, panel_step, deep, out, ahead)`.

    low, high: addresses of 16 weight rows each; panel: the first of `panels` (1 or 2) panels that lie panel_bytes apart
    and have rows of panel_step bytes; deep: tiles along the width.  out: tiles of float32 [16 rows, 16 tokens], the
    first panel's low and high rows, then the second's.  ahead: how many bytes behind these rows the next ones lie.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def product(
        typing: Any, low: Any, high: Any, row_step: Any, panel: Any, panel_bytes: Any, panel_step: Any, deep: Any,
        out: Any, ahead: Any,
    ) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _emit_product(builder, panels, args)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), code

    return product


def _turned(builder: Any, rows: list[Any]) -> list[Any]:
    """Exchange rows and columns of 16 x 16 numbers: in each of four steps, rows that differ in one bit of their number
    exchange the lanes that differ in it."""
    lanes = ir.VectorType(I32, LANES)
    for half in (8, 4, 2, 1):
        keep = ir.Constant(lanes, [lane if lane & half == 0 else LANES + lane - half for lane in range(LANES)])
        swap = ir.Constant(lanes, [lane + half if lane & half == 0 else LANES + lane for lane in range(LANES)])
        turned = list(rows)
        for number in range(LANES):
            if number & half == 0:
                a, b = rows[number], rows[number + half]
                turned[number] = builder.shuffle_vector(a, b, keep)
                turned[number + half] = builder.shuffle_vector(a, b, swap)
        rows = turned
    return rows


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
            for number, row in enumerate(_turned(builder, [builder.bitcast(row, pairs) for row in rows])):
                offset = builder.add(first, builder.mul(tokens, I64(4 * number)))
                store_lanes(builder, row, builder.add(target, offset), mask)

        in_strips(builder, width, DEEP, strip)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), code


def _tile_rows(builder: Any, address: Any) -> list[Any]:
    return [load_lanes(builder, builder.add(address, I64(4 * TILE * r)), F32, LANES, None) for r in range(TILE)]


@intrinsic  # type: ignore[untyped-decorator]
def store_tokens(typing: Any, tile: Any, bias: Any, rows: Any, target: Any, target_step: Any, tokens: Any) -> Any:
    """Write a result tile as bfloat16: target[t, r] = tile[r, t] + bias[r] for r < rows, t < tokens.

    bias: 16 float32 numbers; target_step: bytes between tokens.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        tile, bias, rows, target, target_step, tokens = args
        mask = first_lanes(builder, rows, LANES)
        added = load_lanes(builder, bias, F32, LANES, None)
        room = cgutils.alloca_once(builder, ir.ArrayType(ir.VectorType(I16, LANES), TILE))
        for number, token in enumerate(_turned(builder, _tile_rows(builder, tile))):
            rounded = narrow_lanes(builder, builder.fadd(token, added), BFLOAT16)
            builder.store(rounded, builder.gep(room, [I32(0), I32(number)]))
        with cgutils.for_range(builder, tokens, intp=I64) as loop:
            rounded = builder.load(builder.gep(room, [I32(0), loop.index]))
            store_lanes(builder, rounded, builder.add(target, builder.mul(target_step, loop.index)), mask)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), code


@intrinsic  # type: ignore[untyped-decorator]
def store_gated(typing: Any, gate: Any, up: Any, target: Any, tokens: Any) -> Any:
    """Write silu(gate) * up of two result tiles, rounded to bfloat16, as 8 rows of a panel of `tokens` tokens."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        gate, up, target, tokens = args
        mask = first_lanes(builder, tokens, LANES)
        whole = ir.VectorType(I32, LANES)
        one = ir.Constant(ir.VectorType(F32, LANES), [1.0] * LANES)
        with cgutils.for_range(builder, I64(TILE // 2), intp=I64) as loop:
            halves = []
            for half in range(2):
                place = builder.mul(builder.add(builder.mul(loop.index, I64(2)), I64(half)), I64(4 * TILE))
                g = load_lanes(builder, builder.add(gate, place), F32, LANES, None)
                u = load_lanes(builder, builder.add(up, place), F32, LANES, None)
                power = exp_lanes(builder, builder.fneg(g))
                product = builder.fmul(builder.fdiv(g, builder.fadd(one, power)), u)
                halves.append(builder.zext(narrow_lanes(builder, product, BFLOAT16), whole))
            pair = builder.or_(halves[0], builder.shl(halves[1], ir.Constant(whole, [16] * LANES)))
            row = builder.add(target, builder.mul(loop.index, builder.mul(tokens, I64(4))))
            store_lanes(builder, pair, row, mask)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), code
