"""LANES float32 numbers as one value in Numba: a vector register, or a few, on any processor.

Numba's loops over small arrays are vectorized only after a check that the arrays do not overlap, at every turn of the
outer loop, and their sums live in memory. With a vector type the sums stay in registers and the code reads like the
formula. Each operation is LLVM's on `<32 x float>`, rounded as one float32 operation per lane, never fused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

LANES = 32  # two registers' worth where they are widest: while one sum waits for its last addition, the other goes on
SQUARE = 16  # what is transposed at a time
FLOATS = ir.VectorType(ir.FloatType(), LANES)
BITS = ir.VectorType(ir.IntType(1), LANES)


class _Vector(types.Type):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name="quantkit_lanes")


class _Mask(types.Type):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name="quantkit_mask")


VECTOR, MASK = _Vector(), _Mask()


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, FLOATS)


@register_model(_Mask)
class _MaskModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, BITS)


def _operator(symbol: Callable[..., Any], kind: Any, result: Any, build: Callable[[Any, Any, Any], Any]) -> None:
    """Teach Numba `symbol` on two values of `kind`; build(builder, a, b) makes the instruction."""

    template = type("Template", (ConcreteTemplate,), {"cases": [signature(result, kind, kind)]})
    infer_global(symbol)(template)

    @lower_builtin(symbol, kind, kind)  # type: ignore[untyped-decorator]
    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return build(builder, *args)


_operator(operator.add, VECTOR, VECTOR, lambda builder, a, b: builder.fadd(a, b))
_operator(operator.sub, VECTOR, VECTOR, lambda builder, a, b: builder.fsub(a, b))
_operator(operator.mul, VECTOR, VECTOR, lambda builder, a, b: builder.fmul(a, b))
_operator(operator.truediv, VECTOR, VECTOR, lambda builder, a, b: builder.fdiv(a, b))
_operator(operator.lt, VECTOR, MASK, lambda builder, a, b: builder.fcmp_ordered("<", a, b))
_operator(operator.gt, VECTOR, MASK, lambda builder, a, b: builder.fcmp_ordered(">", a, b))
_operator(operator.ge, VECTOR, MASK, lambda builder, a, b: builder.fcmp_ordered(">=", a, b))
_operator(operator.le, VECTOR, MASK, lambda builder, a, b: builder.fcmp_ordered("<=", a, b))
_operator(operator.eq, VECTOR, MASK, lambda builder, a, b: builder.fcmp_ordered("==", a, b))
_operator(operator.ne, VECTOR, MASK, lambda builder, a, b: builder.fcmp_unordered("!=", a, b))
_operator(operator.and_, MASK, MASK, lambda builder, a, b: builder.and_(a, b))
_operator(operator.or_, MASK, MASK, lambda builder, a, b: builder.or_(a, b))


def _splat(builder: Any, value: Any, kind: Any) -> Any:
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), zeros)


def _row(context: Any, builder: Any, kind: Any, array: Any, row: Any, element: Any) -> Any:
    """Return a pointer to LANES elements of a C-contiguous [n, LANES] or flat array, as one vector."""
    data = cgutils.create_struct_proxy(kind)(context, builder, value=array).data
    offset = builder.mul(row, ir.Constant(row.type, LANES))
    return builder.bitcast(builder.gep(data, [offset]), ir.VectorType(element, LANES).as_pointer())


@intrinsic  # type: ignore[untyped-decorator]
def fill(typing: Any, value: Any) -> Any:
    """Return a vector of one float32 number."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _splat(builder, args[0], FLOATS)

    return VECTOR(types.float32), build


@intrinsic  # type: ignore[untyped-decorator]
def load(typing: Any, array: Any, row: Any) -> Any:
    """Return row `row` of a float32 array [n, LANES]."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load(_row(context, builder, sig.args[0], args[0], args[1], ir.FloatType()), align=4)

    return VECTOR(array, types.intp), build


@intrinsic  # type: ignore[untyped-decorator]
def store(typing: Any, array: Any, row: Any, value: Any) -> Any:
    """Write a vector into row `row` of a float32 array [n, LANES]."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store(args[2], _row(context, builder, sig.args[0], args[0], args[1], ir.FloatType()), align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, VECTOR), build


@intrinsic  # type: ignore[untyped-decorator]
def store_bytes(typing: Any, array: Any, row: Any, value: Any) -> Any:
    """Write a vector of whole numbers -128..255 into row `row` of a uint8 array [n, LANES], as bytes."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        wide = builder.fptosi(args[2], ir.VectorType(ir.IntType(32), LANES))
        narrow = builder.trunc(wide, ir.VectorType(ir.IntType(8), LANES))
        builder.store(narrow, _row(context, builder, sig.args[0], args[0], args[1], ir.IntType(8)), align=1)
        return context.get_dummy_value()

    return types.void(array, types.intp, VECTOR), build


def _at(context: Any, builder: Any, kind: Any, array: Any, offset: Any, element: Any, count: int) -> Any:
    """Return a pointer to `count` elements of a C-contiguous array from element `offset` on, as one vector."""
    data = cgutils.create_struct_proxy(kind)(context, builder, value=array).data
    return builder.bitcast(builder.gep(data, [offset]), ir.VectorType(element, count).as_pointer())


@intrinsic  # type: ignore[untyped-decorator]
def load_at(typing: Any, array: Any, offset: Any) -> Any:
    """Return LANES numbers of a float32 array from element `offset` on."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load(_at(context, builder, sig.args[0], args[0], args[1], ir.FloatType(), LANES), align=4)

    return VECTOR(array, types.intp), build


@intrinsic  # type: ignore[untyped-decorator]
def store_at(typing: Any, array: Any, offset: Any, value: Any) -> Any:
    """Write LANES numbers into a float32 array from element `offset` on."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store(args[2], _at(context, builder, sig.args[0], args[0], args[1], ir.FloatType(), LANES), align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, VECTOR), build


@intrinsic  # type: ignore[untyped-decorator]
def load_bytes(typing: Any, array: Any, offset: Any) -> Any:
    """Return LANES bytes of a uint8 array from element `offset` on, as float32."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        narrow = builder.load(_at(context, builder, sig.args[0], args[0], args[1], ir.IntType(8), LANES), align=1)
        wide = builder.zext(narrow, ir.VectorType(ir.IntType(32), LANES))
        return builder.sitofp(wide, FLOATS)

    return VECTOR(array, types.intp), build


@intrinsic  # type: ignore[untyped-decorator]
def load_nibbles(typing: Any, array: Any, offset: Any) -> Any:
    """Return LANES codes of 4 bits from LANES / 2 bytes of a uint8 array, as float32: the low nibbles, then the high ones."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data = builder.load(_at(context, builder, sig.args[0], args[0], args[1], ir.IntType(8), LANES // 2), align=1)
        wide = ir.VectorType(ir.IntType(32), LANES // 2)
        floats = ir.VectorType(ir.FloatType(), LANES // 2)
        data = builder.zext(data, wide)  # widened once: halves of registers need not be put together
        low = builder.sitofp(builder.and_(data, ir.Constant(wide, [15] * (LANES // 2))), floats)
        high = builder.sitofp(builder.lshr(data, ir.Constant(wide, [4] * (LANES // 2))), floats)
        return builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(ir.IntType(32), LANES), list(range(LANES))))

    return VECTOR(array, types.intp), build


def _fields(width: int) -> Callable[[Any, Any, Any], Any]:
    """Return the typer of a load of LANES codes of `width` bits, a power of two below 8, in the order of lanes."""
    per_word = 32 // width  # lane i takes field i % per_word of the 32-bit word i / per_word
    wide = ir.VectorType(ir.IntType(32), LANES)

    def typer(typing: Any, array: Any, offset: Any) -> Any:
        def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            pointer = _at(context, builder, sig.args[0], args[0], args[1], ir.IntType(8), LANES * width // 8)
            words = builder.bitcast(builder.load(pointer, align=1), ir.VectorType(ir.IntType(32), LANES // per_word))
            spread = builder.shuffle_vector(words, words, ir.Constant(wide, [lane // per_word for lane in range(LANES)]))
            shifted = builder.lshr(spread, ir.Constant(wide, [width * (lane % per_word) for lane in range(LANES)]))
            return builder.uitofp(builder.and_(shifted, ir.Constant(wide, [(1 << width) - 1] * LANES)), FLOATS)

        return VECTOR(array, types.intp), build

    return typer


load_ones = intrinsic(_fields(1))
load_twos = intrinsic(_fields(2))


@intrinsic  # type: ignore[untyped-decorator]
def load_brains(typing: Any, array: Any, offset: Any) -> Any:
    """Return LANES bfloat16 numbers from 2 * LANES bytes of a uint8 array."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = _at(context, builder, sig.args[0], args[0], args[1], ir.IntType(8), 2 * LANES)
        words = builder.bitcast(pointer, ir.VectorType(ir.IntType(16), LANES).as_pointer())
        wide = builder.zext(builder.load(words, align=1), ir.VectorType(ir.IntType(32), LANES))
        shifted = builder.shl(wide, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [16] * LANES))
        return builder.bitcast(shifted, FLOATS)

    return VECTOR(array, types.intp), build


@intrinsic  # type: ignore[untyped-decorator]
def pair(typing: Any, low: Any, high: Any) -> Any:
    """Return a vector whose lower half of lanes holds one float32 number and whose upper half another."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        low, high = (_splat(builder, value, FLOATS) for value in args)
        order = [lane if lane < LANES // 2 else LANES + lane for lane in range(LANES)]
        return builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(ir.IntType(32), LANES), order))

    return VECTOR(types.float32, types.float32), build


@intrinsic  # type: ignore[untyped-decorator]
def half_at(typing: Any, array: Any, offset: Any) -> Any:
    """Return an element of a uint16 array as the float16 it holds, float32."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data = cgutils.create_struct_proxy(sig.args[0])(context, builder, value=args[0]).data
        pointer = builder.bitcast(builder.gep(data, [args[1]]), ir.HalfType().as_pointer())
        return builder.fpext(builder.load(pointer, align=2), ir.FloatType())

    return types.float32(array, types.intp), build


@intrinsic  # type: ignore[untyped-decorator]
def multiply_add(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once where the processor can: for products, not for codes."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{LANES}f32"), args)

    return VECTOR(VECTOR, VECTOR, VECTOR), build


@intrinsic  # type: ignore[untyped-decorator]
def total(typing: Any, value: Any) -> Any:
    """Return the sum of the lanes, pairwise: halves are added until one number is left."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value, count = args[0], LANES
        while count > 1:
            count //= 2
            index = ir.VectorType(ir.IntType(32), count)
            parts = [ir.Constant(index, list(range(start, start + count))) for start in (0, count)]
            low, high = (builder.shuffle_vector(value, value, part) for part in parts)
            value = builder.fadd(low, high)
        return builder.extract_element(value, ir.Constant(ir.IntType(32), 0))

    return types.float32(VECTOR), build


@intrinsic  # type: ignore[untyped-decorator]
def where(typing: Any, mask: Any, a: Any, b: Any) -> Any:
    """Return a where the mask is set, else b."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.select(*args)

    return VECTOR(MASK, VECTOR, VECTOR), build


def _unary(name: str) -> Callable[[Any, Any], Any]:
    def typer(typing: Any, value: Any) -> Any:
        def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            kind = ir.FunctionType(FLOATS, [FLOATS])
            function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v{LANES}f32")
            return builder.call(function, args)

        return VECTOR(VECTOR), build

    return typer


size = intrinsic(_unary("fabs"))
root = intrinsic(_unary("sqrt"))
truncate = intrinsic(_unary("trunc"))
floor = intrinsic(_unary("floor"))


@intrinsic  # type: ignore[untyped-decorator]
def two_to(typing: Any, value: Any) -> Any:
    """Return 2 to the power of whole numbers from -126 to 127."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        wide = ir.VectorType(ir.IntType(32), LANES)
        whole = builder.add(builder.fptosi(args[0], wide), ir.Constant(wide, [127] * LANES))
        return builder.bitcast(builder.shl(whole, ir.Constant(wide, [23] * LANES)), FLOATS)

    return VECTOR(VECTOR), build


@intrinsic  # type: ignore[untyped-decorator]
def clip(typing: Any, value: Any, low: Any, high: Any) -> Any:
    """Return value cut to low..high."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value, low, high = args
        value = builder.select(builder.fcmp_ordered(">", value, low), value, low)
        return builder.select(builder.fcmp_ordered("<", value, high), value, high)

    return VECTOR(VECTOR, VECTOR, VECTOR), build


@intrinsic  # type: ignore[untyped-decorator]
def anywhere(typing: Any, mask: Any) -> Any:
    """Tell whether any lane of a mask is set."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        whole = builder.bitcast(args[0], ir.IntType(LANES))
        return builder.icmp_unsigned("!=", whole, ir.Constant(ir.IntType(LANES), 0))

    return types.boolean(MASK), build


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Return the columns of SQUARE vectors: at each stage, blocks of `step` beside the diagonal change places."""
    rows, step = list(rows), 1
    order_type = ir.VectorType(ir.IntType(32), SQUARE)
    while step < SQUARE:
        upper = [e if not e & step else SQUARE + e - step for e in range(SQUARE)]
        lower = [e + step if not e & step else SQUARE + e for e in range(SQUARE)]
        for i in range(SQUARE):
            if not i & step:
                pair = rows[i], rows[i | step]
                for at, order in ((i, upper), (i | step, lower)):
                    rows[at] = builder.shuffle_vector(*pair, ir.Constant(order_type, order))
        step *= 2
    return rows


def _runs(context: Any, builder: Any, kind: Any, array: Any, offset: Any, stride: Any, element: Any) -> list[Any]:
    """Return pointers to SQUARE vectors that begin at `offset` elements of an array and lie `stride` apart."""
    data = cgutils.create_struct_proxy(kind)(context, builder, value=array).data
    pointers = []
    for i in range(SQUARE):
        place = builder.add(offset, builder.mul(stride, ir.Constant(stride.type, i)))
        pointers.append(builder.bitcast(builder.gep(data, [place]), ir.VectorType(element, SQUARE).as_pointer()))
    return pointers


@intrinsic  # type: ignore[untyped-decorator]
def transpose(typing: Any, source: Any, offset: Any, stride: Any, target: Any, target_offset: Any, target_stride: Any) -> Any:
    """Copy SQUARE runs of SQUARE elements, float32 or uint8, `stride` apart from `offset`, to the columns of such runs in target."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        element = ir.FloatType() if sig.args[0].dtype == types.float32 else ir.IntType(8)
        source, offset, stride, target, target_offset, target_stride = args
        runs = _runs(context, builder, sig.args[0], source, offset, stride, element)
        align = 4 if sig.args[0].dtype == types.float32 else 1
        columns = _transposed(builder, [builder.load(pointer, align=align) for pointer in runs])
        places = _runs(context, builder, sig.args[3], target, target_offset, target_stride, element)
        for value, pointer in zip(columns, places, strict=True):
            builder.store(value, pointer, align=align)
        return context.get_dummy_value()

    return types.void(source, types.intp, types.intp, target, types.intp, types.intp), build
