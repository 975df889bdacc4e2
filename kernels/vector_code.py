"""Two inner loops written as vector code: many dot products at once, and many weighted sums at once.

Everything hot on a CPU is one of these two: a linear layer, an expert and attention scores are dots; attention's sum of
values is a mix.  Written as explicit 16-wide code because a compiler left alone picks half the machine's width, and
because the order of every sum is then fixed: it depends on the width alone, never on how many rows or tokens share a
call.  16-bit numbers are widened to float32 in registers; nothing here is allowed to assume that numbers are finite.
Rejected: the bfloat16 pair product of the machine (vdpbf16ps), which was measured no faster than widening.

Addresses are int64, steps are bytes.  kind: 0 float32, 1 bfloat16, 2 float16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
SIZE = (4, 2, 2)
_I16, _I32, _I64, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()


def _pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _splat(builder: Any, scalar: Any, lanes: int) -> Any:
    one = builder.insert_element(ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined), scalar, _I32(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes))


def _load(builder: Any, address: Any, element: Any, lanes: int, mask: Any) -> Any:
    """Load lanes of `element`; with a mask the lanes outside are zero and not touched."""
    wide = ir.VectorType(element, lanes)
    pointer = _pointer(builder, address, wide)
    if mask is None:
        return builder.load(pointer, align=element.width // 8 if isinstance(element, ir.IntType) else 4)
    name = f"v{lanes}" + (f"i{element.width}" if isinstance(element, ir.IntType) else "f32")
    kind = ir.FunctionType(wide, [pointer.type, _I32, mask.type, wide])
    load = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.load.{name}.p0")
    return builder.call(load, [pointer, _I32(2 if name.endswith("i16") else 4), mask, ir.Constant(wide, None)])


def _load_wide(builder: Any, address: Any, kind: int, lanes: int, mask: Any = None) -> Any:
    """Load lanes of numbers as float32."""
    wide = ir.VectorType(_F32, lanes)
    if kind == FLOAT32:
        return _load(builder, address, _F32, lanes, mask)
    raw = _load(builder, address, _I16, lanes, mask)
    if kind == FLOAT16:
        return builder.fpext(builder.bitcast(raw, ir.VectorType(ir.HalfType(), lanes)), wide)
    whole = ir.VectorType(_I32, lanes)
    return builder.bitcast(builder.shl(builder.zext(raw, whole), ir.Constant(whole, [16] * lanes)), wide)


def _mask(builder: Any, count: Any, lanes: int) -> Any:
    """Lanes 0 .. count - 1."""
    number = ir.Constant(ir.VectorType(_I64, lanes), list(range(lanes)))
    return builder.icmp_signed("<", number, _splat(builder, count, lanes))


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    kind = ir.FunctionType(a.type, [a.type] * 3)
    fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{a.type.count}f32")
    return builder.call(fma, [a, b, c])


def _sums(builder: Any, vectors: list[Any]) -> list[Any]:
    """Sum the lanes of 1, 2, 4, 8 or 16 vectors: always halves first, so a sum is the same whoever shares the call."""

    def lanes(*numbers: int) -> Any:
        return ir.Constant(ir.VectorType(_I32, LANES), list(numbers))

    group, count = LANES, len(vectors)
    while len(vectors) > 1:  # each pair becomes one vector with groups of half the size
        half = group // 2
        low = [lane for start in range(0, 2 * LANES, group) for lane in range(start, start + half)]
        high = [lane + half for lane in low]
        vectors = [
            builder.fadd(builder.shuffle_vector(a, b, lanes(*low)), builder.shuffle_vector(a, b, lanes(*high)))
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        group = half
    total = vectors[0]
    for half in (size for size in (8, 4, 2, 1) if size < group):
        other = lanes(*((lane + half) % LANES for lane in range(LANES)))
        total = builder.fadd(total, builder.shuffle_vector(total, total, other))
    return [builder.extract_element(total, _I32(number * group)) for number in range(count)]


def _emit_dots(builder: Any, rows: int, tokens: int, kind: int, args: Any) -> None:
    row, row_step, token_list, out, out_step, width = args
    zero = ir.Constant(ir.VectorType(_F32, LANES), None)
    totals = [[cgutils.alloca_once(builder, zero.type) for _ in range(tokens)] for _ in range(rows)]
    for line in totals:
        for total in line:
            builder.store(zero, total)
    row_at = [builder.add(row, builder.mul(row_step, _I64(r))) for r in range(rows)]
    ahead = builder.mul(row_step, _I64(rows))
    token_at = [builder.load(_pointer(builder, _element(builder, token_list, _I64(t), 8), _I64)) for t in range(tokens)]

    def step(begin: Any, mask: Any) -> None:
        token_values = [_load(builder, _element(builder, address, begin, 4), _F32, LANES, mask) for address in token_at]
        for line, address in zip(totals, row_at, strict=True):
            _prefetch(builder, builder.add(_element(builder, address, begin, SIZE[kind]), ahead))
            row_values = _load_wide(builder, _element(builder, address, begin, SIZE[kind]), kind, LANES, mask)
            for total, values in zip(line, token_values, strict=True):
                builder.store(_fma(builder, row_values, values, builder.load(total)), total)

    _in_strips(builder, width, LANES, step)
    sums = _sums(builder, [builder.load(totals[r][t]) for t in range(tokens) for r in range(rows)])
    for number, value in enumerate(sums):
        t, r = divmod(number, rows)
        address = builder.add(out, builder.add(builder.mul(out_step, _I64(t)), _I64(4 * r)))
        builder.store(value, _pointer(builder, address, _F32))


def _prefetch(builder: Any, address: Any) -> None:
    """Ask for the cache line of this address; harmless wherever it points."""
    pointer = _pointer(builder, address, ir.IntType(8))
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(prefetch, [pointer, _I32(0), _I32(2), _I32(1)])


def _emit_mix(builder: Any, tokens: int, kind: int, args: Any) -> None:
    value, value_step, count, share, share_step, out, out_step, width = args
    lanes, size = 2 * LANES, SIZE[kind]

    def columns(begin: Any, mask: Any) -> None:
        at = [builder.add(out, builder.add(builder.mul(out_step, _I64(t)), builder.mul(begin, _I64(4))))
              for t in range(tokens)]
        totals = [cgutils.alloca_once(builder, ir.VectorType(_F32, lanes)) for _ in range(tokens)]
        for total, address in zip(totals, at, strict=True):
            builder.store(_load(builder, address, _F32, lanes, mask), total)
        with cgutils.for_range(builder, count, intp=_I64) as loop:
            row = builder.add(value, builder.mul(loop.index, value_step))
            source = _element(builder, row, begin, size)
            values = _load_wide(builder, source, kind, lanes, mask)
            for t, total in enumerate(totals):
                offset = builder.add(builder.mul(share_step, _I64(t)), builder.mul(loop.index, _I64(4)))
                factor = builder.load(_pointer(builder, builder.add(share, offset), _F32))
                builder.store(_fma(builder, values, _splat(builder, factor, lanes), builder.load(total)), total)
        for total, address in zip(totals, at, strict=True):
            _store(builder, builder.load(total), address, mask)

    _in_strips(builder, width, lanes, columns)


def _store(builder: Any, vector: Any, address: Any, mask: Any) -> None:
    element, lanes = vector.type.element, vector.type.count
    bytes_each = element.width // 8 if isinstance(element, ir.IntType) else 4
    pointer = _pointer(builder, address, vector.type)
    if mask is None:
        builder.store(vector, pointer, align=bytes_each)
        return
    kind = ir.FunctionType(ir.VoidType(), [vector.type, pointer.type, _I32, mask.type])
    name = f"llvm.masked.store.v{lanes}{'i' if isinstance(element, ir.IntType) else 'f'}{8 * bytes_each}.p0"
    builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [vector, pointer, _I32(bytes_each), mask])


def _for_each_kind(builder: Any, kind: Any, emit: Callable[[int], None]) -> None:
    for number in (FLOAT32, BFLOAT16, FLOAT16):
        with builder.if_then(builder.icmp_signed("==", kind, _I64(number))):
            emit(number)


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
            _for_each_kind(builder, args[6], lambda number: _emit_dots(builder, rows, tokens, number, args[:6]))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), code

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
            _for_each_kind(builder, args[8], lambda number: _emit_mix(builder, tokens, number, args[:8]))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), code

    return mix


@intrinsic  # type: ignore[untyped-decorator]
def draw(typing: Any, counter: Any) -> Any:
    """Take the next task number from the counter at this address."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(builder, args[0], _I64), _I64(1), "monotonic")

    return types.int64(types.int64), code


@intrinsic  # type: ignore[untyped-decorator]
def at(typing: Any, address: Any) -> Any:
    """Turn an address into a pointer that `carray` takes."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), code


def _narrow(builder: Any, wide: Any, kind: int) -> Any:
    """Round float32 lanes to nearest even as 16-bit numbers, held as integers; NaN stays NaN."""
    half = ir.VectorType(_I16, wide.type.count)
    if kind == FLOAT16:
        return builder.bitcast(builder.fptrunc(wide, ir.VectorType(ir.HalfType(), wide.type.count)), half)
    whole = ir.VectorType(_I32, wide.type.count)

    def every(number: int) -> Any:
        return ir.Constant(whole, [number] * wide.type.count)

    raw = builder.bitcast(wide, whole)
    high = builder.lshr(raw, every(16))
    rounded = builder.lshr(builder.add(raw, builder.add(every(0x7FFF), builder.and_(high, every(1)))), every(16))
    is_nan = builder.fcmp_unordered("uno", wide, wide)
    return builder.trunc(builder.select(is_nan, builder.or_(high, every(0x40)), rounded), half)


def _in_strips(builder: Any, count: Any, lanes: int, strip: Callable[[Any, Any], None]) -> None:
    """Call strip(begin, mask) for every `lanes` of `count` numbers; the last has a mask."""
    whole = builder.sdiv(count, _I64(lanes))
    with cgutils.for_range(builder, whole, intp=_I64) as loop:
        strip(builder.mul(loop.index, _I64(lanes)), None)
    rest = builder.srem(count, _I64(lanes))
    with builder.if_then(builder.icmp_signed(">", rest, _I64(0)), likely=False):
        strip(builder.mul(whole, _I64(lanes)), _mask(builder, rest, lanes))


def _element(builder: Any, base: Any, index: Any, size: int) -> Any:
    return builder.add(base, builder.mul(index, _I64(size)))


@intrinsic  # type: ignore[untyped-decorator]
def widen(typing: Any, source: Any, target: Any, count: Any, kind: Any) -> Any:
    """Copy `count` numbers of this kind to float32."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def emit(number: int) -> None:
            size = SIZE[number]

            def strip(begin: Any, mask: Any) -> None:
                wide = _load_wide(builder, _element(builder, args[0], begin, size), number, LANES, mask)
                _store(builder, wide, _element(builder, args[1], begin, 4), mask)

            _in_strips(builder, args[2], LANES, strip)

        _for_each_kind(builder, args[3], emit)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), code


@intrinsic  # type: ignore[untyped-decorator]
def narrow(typing: Any, source: Any, target: Any, count: Any, kind: Any) -> Any:
    """Copy `count` float32 numbers to this kind, rounded to nearest even."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def emit(number: int) -> None:
            size = SIZE[number]

            def strip(begin: Any, mask: Any) -> None:
                wide = _load(builder, _element(builder, args[0], begin, 4), _F32, LANES, mask)
                value = wide if number == FLOAT32 else _narrow(builder, wide, number)
                _store(builder, value, _element(builder, args[1], begin, size), mask)

            _in_strips(builder, args[2], LANES, strip)

        _for_each_kind(builder, args[3], emit)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), code


def _exp(builder: Any, x: Any) -> Any:
    """e ** x to within 2 units in the last place: 2 ** whole times a polynomial of the rest; NaN stays NaN."""
    kind, lanes = x.type, x.type.count

    def every(number: float) -> Any:
        return ir.Constant(kind, [number] * lanes)

    def named(name: str, *args: Any) -> Any:
        function = ir.FunctionType(kind, [kind] * len(args))
        return builder.call(
            cgutils.get_or_insert_function(builder.module, function, f"llvm.{name}.v{lanes}f32"), list(args)
        )

    near = named("maxnum", named("minnum", x, every(88.7)), every(-87.3))
    whole = named("rint", builder.fmul(near, every(1.4426950408889634)))
    rest = named("fma", whole, every(-0.693145751953125), near)
    rest = named("fma", whole, every(-1.4286068203094172e-06), rest)
    power = every(1.0 / 5040)
    for factor in (1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0):
        power = named("fma", power, rest, every(factor))
    integer = ir.VectorType(_I32, lanes)
    exponent = builder.shl(builder.fptosi(whole, integer), ir.Constant(integer, [23] * lanes))
    result = builder.bitcast(builder.add(builder.bitcast(power, integer), exponent), kind)
    result = builder.select(builder.fcmp_ordered("<", x, every(-87.3)), every(0.0), result)
    result = builder.select(builder.fcmp_ordered(">", x, every(88.7)), every(float("inf")), result)
    return builder.select(builder.fcmp_unordered("uno", x, x), x, result)


@intrinsic  # type: ignore[untyped-decorator]
def exponential(typing: Any, source: Any, target: Any, count: Any, scale: Any, shift: Any) -> Any:
    """target[i] = e ** (source[i] * scale - shift) for float32 numbers; may work in place."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scales, shifts = _splat(builder, args[3], LANES), _splat(builder, args[4], LANES)

        def strip(begin: Any, mask: Any) -> None:
            x = _load(builder, _element(builder, args[0], begin, 4), _F32, LANES, mask)
            x = builder.fsub(builder.fmul(x, scales), shifts)
            _store(builder, _exp(builder, x), _element(builder, args[1], begin, 4), mask)

        _in_strips(builder, args[2], LANES, strip)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.float32, types.float32), code


def _fold(builder: Any, source: Any, count: Any, empty: float, fold: Callable[[Any, Any], Any]) -> Any:
    """Fold float32 numbers lane by lane; lanes behind the last number are `empty`."""
    kind = ir.VectorType(_F32, LANES)
    nothing = ir.Constant(kind, [empty] * LANES)
    total = cgutils.alloca_once(builder, kind)
    builder.store(nothing, total)

    def strip(begin: Any, mask: Any) -> None:
        x = _load(builder, _element(builder, source, begin, 4), _F32, LANES, mask)
        x = x if mask is None else builder.select(mask, x, nothing)
        builder.store(fold(builder.load(total), x), total)

    _in_strips(builder, count, LANES, strip)
    return builder.load(total)


@intrinsic  # type: ignore[untyped-decorator]
def largest(typing: Any, source: Any, count: Any) -> Any:
    """Return the largest of `count` float32 numbers, passing over NaN; -inf of none."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.VectorType(_F32, LANES)
        function = ir.FunctionType(kind, [kind, kind])
        larger = cgutils.get_or_insert_function(builder.module, function, f"llvm.maxnum.v{LANES}f32")
        lanes = _fold(builder, args[0], args[1], float("-inf"), lambda a, b: builder.call(larger, [a, b]))
        for half in (8, 4, 2, 1):
            turn = ir.Constant(ir.VectorType(_I32, LANES), [(lane + half) % LANES for lane in range(LANES)])
            lanes = builder.call(larger, [lanes, builder.shuffle_vector(lanes, lanes, turn)])
        return builder.extract_element(lanes, _I32(0))

    return types.float32(types.int64, types.int64), code


@intrinsic  # type: ignore[untyped-decorator]
def summed(typing: Any, source: Any, count: Any) -> Any:
    """Return the sum of `count` float32 numbers, in an order fixed by the count."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _sums(builder, [_fold(builder, args[0], args[1], 0.0, builder.fadd)])[0]

    return types.float32(types.int64, types.int64), code
