"""Words of vector code: the pieces of machine-independent assembly that the compiled kernels' inner loops are made of.

A kernel's inner loop is emitted here and there as explicit 16-wide instructions, because a compiler left alone picks
half the machine's width and orders sums as it likes.  These functions append instructions to a builder at compile time;
none runs in a job.  16-bit numbers are widened to float32 in registers and rounded back to nearest even; nothing may
assume that numbers are finite.

Addresses are int64, steps are bytes.  kind: 0 float32, 1 bfloat16, 2 float16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

LANES = 16
FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
SIZE = (4, 2, 2)
I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()


class Bfloat16(ir.Type):  # type: ignore[misc]
    """The bfloat16 numbers of the machine, for which llvmlite has no name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bfloat16)

    def __hash__(self) -> int:
        return hash(Bfloat16)


def pointer_to(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def element_at(builder: Any, base: Any, index: Any, size: int) -> Any:
    return builder.add(base, builder.mul(index, I64(size)))


def splat(builder: Any, scalar: Any, lanes: int) -> Any:
    one = builder.insert_element(ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined), scalar, I32(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))


def first_lanes(builder: Any, count: Any, lanes: int) -> Any:
    """Lanes 0 .. count - 1."""
    number = ir.Constant(ir.VectorType(I64, lanes), list(range(lanes)))
    return builder.icmp_signed("<", number, splat(builder, count, lanes))


def load_lanes(builder: Any, address: Any, element: Any, lanes: int, mask: Any) -> Any:
    """Load lanes of `element`; with a mask the lanes outside are zero and not touched."""
    wide = ir.VectorType(element, lanes)
    pointer = pointer_to(builder, address, wide)
    if mask is None:
        return builder.load(pointer, align=element.width // 8 if isinstance(element, ir.IntType) else 4)
    name = f"v{lanes}" + (f"i{element.width}" if isinstance(element, ir.IntType) else "f32")
    kind = ir.FunctionType(wide, [pointer.type, I32, mask.type, wide])
    load = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.load.{name}.p0")
    return builder.call(load, [pointer, I32(2 if name.endswith("i16") else 4), mask, ir.Constant(wide, None)])


def load_wide(builder: Any, address: Any, kind: int, lanes: int, mask: Any = None) -> Any:
    """Load lanes of numbers as float32."""
    wide = ir.VectorType(F32, lanes)
    if kind == FLOAT32:
        return load_lanes(builder, address, F32, lanes, mask)
    raw = load_lanes(builder, address, I16, lanes, mask)
    if kind == FLOAT16:
        return builder.fpext(builder.bitcast(raw, ir.VectorType(ir.HalfType(), lanes)), wide)
    whole = ir.VectorType(I32, lanes)
    return builder.bitcast(builder.shl(builder.zext(raw, whole), ir.Constant(whole, [16] * lanes)), wide)


def store_lanes(builder: Any, vector: Any, address: Any, mask: Any) -> None:
    element, lanes = vector.type.element, vector.type.count
    bytes_each = element.width // 8 if isinstance(element, ir.IntType) else 4
    pointer = pointer_to(builder, address, vector.type)
    if mask is None:
        builder.store(vector, pointer, align=bytes_each)
        return
    kind = ir.FunctionType(ir.VoidType(), [vector.type, pointer.type, I32, mask.type])
    name = f"llvm.masked.store.v{lanes}{'i' if isinstance(element, ir.IntType) else 'f'}{8 * bytes_each}.p0"
    builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [vector, pointer, I32(bytes_each), mask])


def narrow_lanes(builder: Any, wide: Any, kind: int) -> Any:
    """Round float32 lanes to nearest even as 16-bit numbers, held as integers; NaN stays NaN."""
    half = ir.VectorType(I16, wide.type.count)
    if kind == FLOAT16:
        return builder.bitcast(builder.fptrunc(wide, ir.VectorType(ir.HalfType(), wide.type.count)), half)
    whole = ir.VectorType(I32, wide.type.count)

    def every(number: int) -> Any:
        return ir.Constant(whole, [number] * wide.type.count)

    raw = builder.bitcast(wide, whole)
    high = builder.lshr(raw, every(16))
    rounded = builder.lshr(builder.add(raw, builder.add(every(0x7FFF), builder.and_(high, every(1)))), every(16))
    is_nan = builder.fcmp_unordered("uno", wide, wide)
    return builder.trunc(builder.select(is_nan, builder.or_(high, every(0x40)), rounded), half)


def prefetch(builder: Any, address: Any, to_write: bool = False) -> None:
    """Ask for the cache line of this address, near if it is to be written; harmless wherever it points."""
    pointer = pointer_to(builder, address, I8)
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(prefetch, [pointer, I32(int(to_write)), I32(3 if to_write else 2), I32(1)])


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    kind = ir.FunctionType(a.type, [a.type] * 3)
    fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{a.type.count}f32")
    return builder.call(fma, [a, b, c])


def exp_lanes(builder: Any, x: Any) -> Any:
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
    integer = ir.VectorType(I32, lanes)
    exponent = builder.shl(builder.fptosi(whole, integer), ir.Constant(integer, [23] * lanes))
    result = builder.bitcast(builder.add(builder.bitcast(power, integer), exponent), kind)
    result = builder.select(builder.fcmp_ordered("<", x, every(-87.3)), every(0.0), result)
    result = builder.select(builder.fcmp_ordered(">", x, every(88.7)), every(float("inf")), result)
    return builder.select(builder.fcmp_unordered("uno", x, x), x, result)


def turn_lanes(builder: Any, rows: list[Any]) -> list[Any]:
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


def lane_sums(builder: Any, vectors: list[Any]) -> list[Any]:
    """Sum the lanes of 1, 2, 4, 8 or 16 vectors: always halves first, so a sum is the same whoever shares the call."""

    def lanes(*numbers: int) -> Any:
        return ir.Constant(ir.VectorType(I32, LANES), list(numbers))

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
    return [builder.extract_element(total, I32(number * group)) for number in range(count)]


def in_strips(builder: Any, count: Any, lanes: int, strip: Callable[[Any, Any], None]) -> None:
    """Call strip(begin, mask) for every `lanes` of `count` numbers; the last has a mask."""
    whole = builder.sdiv(count, I64(lanes))
    with cgutils.for_range(builder, whole, intp=I64) as loop:
        strip(builder.mul(loop.index, I64(lanes)), None)
    rest = builder.srem(count, I64(lanes))
    with builder.if_then(builder.icmp_signed(">", rest, I64(0)), likely=False):
        strip(builder.mul(whole, I64(lanes)), first_lanes(builder, rest, lanes))


def for_each_kind(builder: Any, kind: Any, emit: Callable[[int], None]) -> None:
    for number in (FLOAT32, BFLOAT16, FLOAT16):
        with builder.if_then(builder.icmp_signed("==", kind, I64(number))):
            emit(number)
