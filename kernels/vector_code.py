"""Two inner loops written as vector code: many dot products at once, and many weighted sums at once.

Everything hot on a CPU is one of these two: a linear layer, an expert and attention scores are dots; attention's sum of
values is a mix.  Written as explicit 16-wide code because a compiler left alone picks half the machine's width, and
because the order of every sum is then fixed: it depends on the width alone, never on how many rows or tokens share a
call.  16-bit numbers are widened to float32 in registers; nothing here is allowed to assume that numbers are finite.
bfloat16 tokens against bfloat16 rows have the machine's own pair product (vdpbf16ps), twice as fast where
many tokens pass and no faster than widening where one does, for memory bounds that.

Addresses are int64, steps are bytes.  kind: 0 float32, 1 bfloat16, 2 float16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from bgmpi.kernels.emit import (
    F32,
    FLOAT32,
    I16,
    I32,
    I64,
    LANES,
    SIZE,
    Bfloat16,
    element_at,
    exp_lanes,
    fma,
    for_each_kind,
    in_strips,
    lane_sums,
    load_lanes,
    load_wide,
    narrow_lanes,
    pointer_to,
    prefetch,
    splat,
    store_lanes,
)


def _emit_dots(builder: Any, rows: int, tokens: int, args: Any, lanes: int, load: Any, add: Any) -> None:
    """Emit rows x tokens dot products.  load(address, begin, mask, is_row): `lanes` numbers; add(total, row, token)."""
    row, row_step, token_list, out, out_step, width, size = args
    zero = ir.Constant(ir.VectorType(F32, LANES), None)
    totals = [[cgutils.alloca_once(builder, zero.type) for _ in range(tokens)] for _ in range(rows)]
    for line in totals:
        for total in line:
            builder.store(zero, total)
    row_at = [builder.add(row, builder.mul(row_step, I64(r))) for r in range(rows)]
    ahead = builder.mul(row_step, I64(rows))
    token_at = [
        builder.load(pointer_to(builder, element_at(builder, token_list, I64(t), 8), I64)) for t in range(tokens)
    ]

    def step(begin: Any, mask: Any) -> None:
        token_values = [load(address, begin, mask, False) for address in token_at]
        for line, address in zip(totals, row_at, strict=True):
            prefetch(builder, builder.add(element_at(builder, address, begin, size), ahead))
            row_values = load(address, begin, mask, True)
            for total, values in zip(line, token_values, strict=True):
                builder.store(add(builder.load(total), row_values, values), total)

    in_strips(builder, width, lanes, step)
    sums = lane_sums(builder, [builder.load(totals[r][t]) for t in range(tokens) for r in range(rows)])
    for number, value in enumerate(sums):
        t, r = divmod(number, rows)
        address = builder.add(out, builder.add(builder.mul(out_step, I64(t)), I64(4 * r)))
        builder.store(value, pointer_to(builder, address, F32))


def _emit_wide_dots(builder: Any, rows: int, tokens: int, kind: int, args: Any) -> None:
    def load(address: Any, begin: Any, mask: Any, is_row: bool) -> Any:
        number = kind if is_row else FLOAT32
        return load_wide(builder, element_at(builder, address, begin, SIZE[number]), number, LANES, mask)

    def add(total: Any, row: Any, token: Any) -> Any:
        return fma(builder, row, token, total)

    _emit_dots(builder, rows, tokens, (*args, SIZE[kind]), LANES, load, add)


def _emit_pair_dots(builder: Any, rows: int, tokens: int, args: Any) -> None:
    whole, pairs = ir.VectorType(F32, LANES), ir.VectorType(Bfloat16(), 2 * LANES)
    kind = ir.FunctionType(whole, [whole, pairs, pairs])
    product = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")

    def load(address: Any, begin: Any, mask: Any, is_row: bool) -> Any:
        lanes = load_lanes(builder, element_at(builder, address, begin, 2), I16, 2 * LANES, mask)
        return builder.bitcast(lanes, pairs)

    def add(total: Any, row: Any, token: Any) -> Any:
        return builder.call(product, [total, row, token])

    _emit_dots(builder, rows, tokens, (*args, 2), 2 * LANES, load, add)


def _emit_mix(builder: Any, tokens: int, kind: int, args: Any) -> None:
    value, value_step, count, share, share_step, out, out_step, width = args
    lanes, size = 2 * LANES, SIZE[kind]

    def columns(begin: Any, mask: Any) -> None:
        at = [builder.add(out, builder.add(builder.mul(out_step, I64(t)), builder.mul(begin, I64(4))))
              for t in range(tokens)]
        totals = [cgutils.alloca_once(builder, ir.VectorType(F32, lanes)) for _ in range(tokens)]
        for total, address in zip(totals, at, strict=True):
            builder.store(load_lanes(builder, address, F32, lanes, mask), total)
        with cgutils.for_range(builder, count, intp=I64) as loop:
            row = builder.add(value, builder.mul(loop.index, value_step))
            source = element_at(builder, row, begin, size)
            values = load_wide(builder, source, kind, lanes, mask)
            for t, total in enumerate(totals):
                offset = builder.add(builder.mul(share_step, I64(t)), builder.mul(loop.index, I64(4)))
                factor = builder.load(pointer_to(builder, builder.add(share, offset), F32))
                builder.store(fma(builder, values, splat(builder, factor, lanes), builder.load(total)), total)
        for total, address in zip(totals, at, strict=True):
            store_lanes(builder, builder.load(total), address, mask)

    in_strips(builder, width, lanes, columns)


def make_dots(rows: int, tokens: int) -> Any:
    """Make `dots(row, row_step, token_list, out, out_step, width, kind)`: out[t, r] = row r . token t in float32.

    row: address of the first of `rows` rows of this kind; token_list: address of `tokens` int64 addresses of float32
    rows; out: float32, out_step bytes between tokens; width: numbers in a row.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def dots(
        typing: Any, row: Any, row_step: Any, token_list: Any, out: Any, out_step: Any, width: Any, kind: Any
    ) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            for_each_kind(builder, args[6], lambda number: _emit_wide_dots(builder, rows, tokens, number, args[:6]))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), code

    return dots


def compiled_for_pairs() -> bool:
    """Say whether kernels are compiled for a machine that adds pairs of bfloat16 products (see `make_pair_dots`)."""
    return "+avx512bf16" in cpu_target.target_context.codegen().magic_tuple()[2].split(",")


def make_pair_dots(rows: int, tokens: int) -> Any:
    """Make `dots(row, row_step, token_list, out, out_step, width)`, as `make_dots` has it, of bfloat16 rows and tokens.

    The machine adds two neighbouring products at once, hence another order of the sum than that of `make_dots`, and
    flushes denormal numbers to zero.  Not to be run where `compiled_for_pairs` says no.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def dots(typing: Any, row: Any, row_step: Any, token_list: Any, out: Any, out_step: Any, width: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            if compiled_for_pairs():
                _emit_pair_dots(builder, rows, tokens, args)
            else:
                trap = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), []), "llvm.trap")
                builder.call(trap, [])
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), code

    return dots


def make_mix(tokens: int) -> Any:
    """Make `mix(value, value_step, count, share, share_step, out, out_step, width, kind)`.

    out[t] += sum over j < count, ascending, of share[t, j] * value row j; share and out are float32.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def mix(
        typing: Any, value: Any, value_step: Any, count: Any, share: Any, share_step: Any, out: Any, out_step: Any,
        width: Any, kind: Any,
    ) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            for_each_kind(builder, args[8], lambda number: _emit_mix(builder, tokens, number, args[:8]))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), code

    return mix


@intrinsic  # type: ignore[untyped-decorator]
def at(typing: Any, address: Any) -> Any:
    """Turn an address into a pointer that `carray` takes."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), code


@intrinsic  # type: ignore[untyped-decorator]
def widen(typing: Any, source: Any, target: Any, count: Any, kind: Any) -> Any:
    """Copy `count` numbers of this kind to float32."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def emit(number: int) -> None:
            size = SIZE[number]

            def strip(begin: Any, mask: Any) -> None:
                wide = load_wide(builder, element_at(builder, args[0], begin, size), number, LANES, mask)
                store_lanes(builder, wide, element_at(builder, args[1], begin, 4), mask)

            in_strips(builder, args[2], LANES, strip)

        for_each_kind(builder, args[3], emit)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), code


@intrinsic  # type: ignore[untyped-decorator]
def narrow(typing: Any, source: Any, target: Any, count: Any, kind: Any) -> Any:
    """Copy `count` float32 numbers to this kind, rounded to nearest even."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def emit(number: int) -> None:
            size = SIZE[number]

            def strip(begin: Any, mask: Any) -> None:
                wide = load_lanes(builder, element_at(builder, args[0], begin, 4), F32, LANES, mask)
                value = wide if number == FLOAT32 else narrow_lanes(builder, wide, number)
                store_lanes(builder, value, element_at(builder, args[1], begin, size), mask)

            in_strips(builder, args[2], LANES, strip)

        for_each_kind(builder, args[3], emit)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), code


@intrinsic  # type: ignore[untyped-decorator]
def exponential(typing: Any, source: Any, target: Any, count: Any, scale: Any, shift: Any) -> Any:
    """target[i] = e ** (source[i] * scale - shift) for float32 numbers; may work in place."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scales, shifts = splat(builder, args[3], LANES), splat(builder, args[4], LANES)

        def strip(begin: Any, mask: Any) -> None:
            x = load_lanes(builder, element_at(builder, args[0], begin, 4), F32, LANES, mask)
            x = builder.fsub(builder.fmul(x, scales), shifts)
            store_lanes(builder, exp_lanes(builder, x), element_at(builder, args[1], begin, 4), mask)

        in_strips(builder, args[2], LANES, strip)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.float32, types.float32), code


@intrinsic  # type: ignore[untyped-decorator]
def gate(typing: Any, values: Any, up: Any, count: Any) -> Any:
    """values[i] = silu(values[i]) * up[i] for float32 numbers, in place."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        one = ir.Constant(ir.VectorType(F32, LANES), [1.0] * LANES)

        def strip(begin: Any, mask: Any) -> None:
            target = element_at(builder, args[0], begin, 4)
            x = load_lanes(builder, target, F32, LANES, mask)
            silu = builder.fdiv(x, builder.fadd(one, exp_lanes(builder, builder.fneg(x))))
            other = load_lanes(builder, element_at(builder, args[1], begin, 4), F32, LANES, mask)
            store_lanes(builder, builder.fmul(silu, other), target, mask)

        in_strips(builder, args[2], LANES, strip)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), code


def _fold(builder: Any, source: Any, count: Any, empty: float, fold: Callable[[Any, Any], Any]) -> Any:
    """Fold float32 numbers lane by lane; lanes behind the last number are `empty`."""
    kind = ir.VectorType(F32, LANES)
    nothing = ir.Constant(kind, [empty] * LANES)
    total = cgutils.alloca_once(builder, kind)
    builder.store(nothing, total)

    def strip(begin: Any, mask: Any) -> None:
        x = load_lanes(builder, element_at(builder, source, begin, 4), F32, LANES, mask)
        x = x if mask is None else builder.select(mask, x, nothing)
        builder.store(fold(builder.load(total), x), total)

    in_strips(builder, count, LANES, strip)
    return builder.load(total)


@intrinsic  # type: ignore[untyped-decorator]
def largest(typing: Any, source: Any, count: Any) -> Any:
    """Return the largest of `count` float32 numbers, passing over NaN; -inf of none."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.VectorType(F32, LANES)
        function = ir.FunctionType(kind, [kind, kind])
        larger = cgutils.get_or_insert_function(builder.module, function, f"llvm.maxnum.v{LANES}f32")
        lanes = _fold(builder, args[0], args[1], float("-inf"), lambda a, b: builder.call(larger, [a, b]))
        for half in (8, 4, 2, 1):
            turn = ir.Constant(ir.VectorType(I32, LANES), [(lane + half) % LANES for lane in range(LANES)])
            lanes = builder.call(larger, [lanes, builder.shuffle_vector(lanes, lanes, turn)])
        return builder.extract_element(lanes, I32(0))

    return types.float32(types.int64, types.int64), code


@intrinsic  # type: ignore[untyped-decorator]
def summed(typing: Any, source: Any, count: Any) -> Any:
    """Return the sum of `count` float32 numbers, in an order fixed by the count."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return lane_sums(builder, [_fold(builder, args[0], args[1], 0.0, builder.fadd)])[0]

    return types.float32(types.int64, types.int64), code
