"""Vectors in Numba: LLVM vector types with operators, loads and stores, so that a kernel reads like its formula.

Three types, each 64 bytes: `bytes64` (64 x int8), `ints` (16 x int32) and `floats` (16 x float32), plus
`halfs` (16 x 16 bits, float16 values in memory). LLVM splits them into whatever registers the CPU has, and
every operation here works lane by lane, so the bits are the same on all of them.

Memory is given as an address (int64); nothing here checks it. Operators: `+ - *` on floats and ints,
`& | ^ << >>` on ints and bytes (shifts are logical), between two vectors or a vector and a scalar.
"""

import operator

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, models, register_model
from numba.np.numpy_support import carray

from ropewalk.kernels.cpu import has_native_half
from ropewalk.kernels.jit import inline

I8, I16, I32, I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
F32 = ir.FloatType()
LANES = 16
ROUNDER = 1.5 * 2**23
"""x + ROUNDER has no bits for a fraction: |x| < 2^22 is rounded half to even, and the low bits are the integer."""


class Vector(types.Type):
    """A fixed-width vector of `lanes` elements of one LLVM type."""

    def __init__(self, name: str, element: ir.Type, lanes: int) -> None:
        self.element = element
        self.lanes = lanes
        self.ir = ir.VectorType(element, lanes)
        super().__init__(name=name)

    def constant(self, value):
        return ir.Constant(self.ir, [value] * self.lanes)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, fe_type.ir)


bytes64 = Vector("bytes64", I8, 64)
ints = Vector("ints", I32, LANES)
floats = Vector("floats", F32, LANES)
halfs = Vector("halfs", I16, LANES)


# ---- the same things for code that builds LLVM instructions itself


def emit_splat(builder, vector, scalar):
    one = builder.insert_element(ir.Constant(vector.ir, ir.Undefined), scalar, I32(0))
    zeros = ir.Constant(ir.VectorType(I32, vector.lanes), [0] * vector.lanes)
    return builder.shuffle_vector(one, ir.Constant(vector.ir, ir.Undefined), zeros)


def emit_load(builder, llvm_type, address, align=1):
    value = builder.load(builder.inttoptr(address, llvm_type.as_pointer()))
    value.align = align
    return value


def emit_call(builder, name, result, arguments):
    """Call an LLVM intrinsic or C function of this name."""
    fn = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(result, [a.type for a in arguments]), name
    )
    return builder.call(fn, arguments)


def emit_fma(builder, a, b, c):
    return emit_call(builder, "llvm.fma.v16f32", floats.ir, [a, b, c])


# ---- operators


def _register(op, emit_float, emit_int):
    class Template(AbstractTemplate):
        def generic(self, args, kws):
            if kws or len(args) != 2 or not isinstance(args[0], Vector):
                return None
            a, b = args
            if b == a:
                return signature(a, a, b)
            if isinstance(b, types.Number) and not isinstance(b, types.Complex):
                return signature(a, a, types.float32 if a is floats else types.int64)
            return None

    infer_global(op)(Template)

    def emit(builder, vector, a, b):
        chosen = emit_float if vector == floats else emit_int
        if chosen is None:
            raise NotImplementedError(f"{op.__name__} on {vector}")
        return chosen(builder)(a, b)

    @lower_builtin(op, Vector, Vector)
    def lower_vectors(context, builder, sig, args):
        return emit(builder, sig.args[0], args[0], args[1])

    @lower_builtin(op, Vector, types.Number)
    def lower_scalar(context, builder, sig, args):
        vector, scalar = sig.args[0], args[1]
        if vector != floats:
            scalar = builder.trunc(scalar, vector.element) if vector.element.width < 64 else scalar
        return emit(builder, vector, args[0], emit_splat(builder, vector, scalar))


_register(operator.add, lambda b: b.fadd, lambda b: b.add)
_register(operator.sub, lambda b: b.fsub, lambda b: b.sub)
_register(operator.mul, lambda b: b.fmul, lambda b: b.mul)
_register(operator.truediv, lambda b: b.fdiv, None)
_register(operator.and_, None, lambda b: b.and_)
_register(operator.or_, None, lambda b: b.or_)
_register(operator.xor, None, lambda b: b.xor)
_register(operator.lshift, None, lambda b: b.shl)
_register(operator.rshift, None, lambda b: b.lshr)


# ---- memory


def _make_load(vector):
    @intrinsic
    def load(typing_context, address):
        def emit(context, builder, sig, args):
            return emit_load(builder, vector.ir, args[0])

        return vector(types.int64), emit

    return load


def _make_store(vector):
    @intrinsic
    def store(typing_context, address, value):
        def emit(context, builder, sig, args):
            builder.store(args[1], builder.inttoptr(args[0], vector.ir.as_pointer())).align = 1
            return context.get_dummy_value()

        return types.void(types.int64, vector), emit

    return store


load_bytes, load_ints, load_floats, _load_halfs = (_make_load(v) for v in (bytes64, ints, floats, halfs))
store_bytes, store_ints, store_floats = (_make_store(v) for v in (bytes64, ints, floats))


def _make_scalar(numba_type, llvm_type):
    @intrinsic
    def load(typing_context, address):
        def emit(context, builder, sig, args):
            return emit_load(builder, llvm_type, args[0])

        return numba_type(types.int64), emit

    @intrinsic
    def store(typing_context, address, value):
        def emit(context, builder, sig, args):
            builder.store(args[1], builder.inttoptr(args[0], llvm_type.as_pointer())).align = 1
            return context.get_dummy_value()

        return types.void(types.int64, numba_type), emit

    return load, store


load_f32, store_f32 = _make_scalar(types.float32, F32)
load_i32, store_i32 = _make_scalar(types.int32, I32)
load_i64, store_i64 = _make_scalar(types.int64, I64)
load_u16, store_u16 = _make_scalar(types.uint16, I16)
load_u8, store_u8 = _make_scalar(types.uint8, I8)


@intrinsic
def load_u8_as_ints(typing_context, address):
    """16 unsigned bytes, as ints."""

    def emit(context, builder, sig, args):
        return builder.zext(emit_load(builder, ir.VectorType(I8, LANES), args[0]), ints.ir)

    return ints(types.int64), emit


@intrinsic
def load_i8_as_ints(typing_context, address):
    """16 signed bytes, as ints."""

    def emit(context, builder, sig, args):
        return builder.sext(emit_load(builder, ir.VectorType(I8, LANES), args[0]), ints.ir)

    return ints(types.int64), emit


def _make_prefetch(locality, doc):
    @intrinsic(prefer_literal=True)
    def fetch(typing_context, address, lines):
        def emit(context, builder, sig, args):
            for line in range(lines.literal_value):
                at = builder.inttoptr(builder.add(args[0], I64(64 * line)), I8.as_pointer())
                emit_call(builder, "llvm.prefetch.p0", ir.VoidType(), [at, I32(0), I32(locality), I32(1)])
            return context.get_dummy_value()

        return types.void(types.int64, lines), emit

    fetch.__doc__ = doc
    return fetch


prefetch_near = _make_prefetch(
    3, "Bring lines of memory to the first-level cache; an address that is no memory does nothing."
)
prefetch = _make_prefetch(2, "The same to the second-level cache.")


# ---- arithmetic


def _make_unary(result, argument, build):
    @intrinsic
    def op(typing_context, value):
        def emit(context, builder, sig, args):
            return build(builder, args[0])

        return result(argument), emit

    return op


splat = _make_unary(floats, types.float32, lambda b, x: emit_splat(b, floats, x))
splat_int = _make_unary(ints, types.int32, lambda b, x: emit_splat(b, ints, x))
to_floats = _make_unary(floats, ints, lambda b, x: b.sitofp(x, floats.ir))
absolute = _make_unary(floats, floats, lambda b, x: emit_call(b, "llvm.fabs.v16f32", floats.ir, [x]))
square_root = _make_unary(floats, floats, lambda b, x: emit_call(b, "llvm.sqrt.v16f32", floats.ir, [x]))
bits_of = _make_unary(ints, floats, lambda b, x: b.bitcast(x, ints.ir))
float_of_bits = _make_unary(floats, ints, lambda b, x: b.bitcast(x, floats.ir))
sum_ints = _make_unary(
    types.int32, ints, lambda b, x: emit_call(b, "llvm.vector.reduce.add.v16i32", I32, [x])
)


def _emit_rint(builder, x):
    """Round half to even."""
    return emit_call(builder, "llvm.roundeven.v16f32", floats.ir, [x])


round_to_ints = _make_unary(  # of values that an int32 holds: anything else gives what the CPU likes
    ints, floats, lambda b, x: b.fptosi(_emit_rint(b, x), ints.ir)
)
round_even = _make_unary(floats, floats, _emit_rint)


@intrinsic
def fma(typing_context, a, b, c):
    """a * b + c with one rounding, lane by lane."""

    def emit(context, builder, sig, args):
        return emit_fma(builder, *args)

    return floats(floats, floats, floats), emit


def emit_greater(builder, a, b):
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@intrinsic
def maximum(typing_context, a, b):
    """The greater of a and b, lane by lane; b where either is NaN."""

    def emit(context, builder, sig, args):
        return emit_greater(builder, *args)

    return floats(floats, floats), emit


@intrinsic
def minimum(typing_context, a, b):
    """The lesser of a and b, lane by lane; b where either is NaN."""

    def emit(context, builder, sig, args):
        return builder.select(builder.fcmp_ordered("<", args[0], args[1]), args[0], args[1])

    return floats(floats, floats), emit


def _make_shuffle(lanes, doc):
    @intrinsic
    def shuffle(typing_context, a, b):
        def emit(context, builder, sig, args):
            return builder.shuffle_vector(*args, ir.Constant(ints.ir, lanes))

        return floats(floats, floats), emit

    shuffle.__doc__ = doc
    return shuffle


evens = _make_shuffle(list(range(0, 32, 2)), "Lanes 0, 2, 4 ... of a and of b.")
odds = _make_shuffle(list(range(1, 32, 2)), "Lanes 1, 3, 5 ... of a and of b.")
zip_low = _make_shuffle([16 * (i & 1) + i // 2 for i in range(16)], "Lanes 0 ... 7 of a and b by turns.")
zip_high = _make_shuffle(
    [16 * (i & 1) + i // 2 + 8 for i in range(16)], "Lanes 8 ... 15 of a and b by turns."
)


def _fold(builder, value, combine):
    """Reduce 16 lanes by halves: a fixed tree, whatever the CPU."""
    for width in (8, 4, 2, 1):
        lanes = ir.VectorType(I32, width)
        undefined = ir.Constant(value.type, ir.Undefined)
        low = builder.shuffle_vector(value, undefined, ir.Constant(lanes, list(range(width))))
        high = builder.shuffle_vector(value, undefined, ir.Constant(lanes, list(range(width, 2 * width))))
        value = combine(builder, low, high)
    return builder.extract_element(value, I32(0))


def emit_sum_tree(builder, value):
    return _fold(builder, value, lambda b, x, y: b.fadd(x, y))


@intrinsic
def sum_tree(typing_context, value):
    """Sum of the 16 lanes by a fixed tree: lanes i and i + 8, then i and i + 4, and so on."""

    def emit(context, builder, sig, args):
        return emit_sum_tree(builder, args[0])

    return types.float32(floats), emit


@intrinsic
def max_lane(typing_context, value):
    """The greatest of the 16 lanes."""

    def emit(context, builder, sig, args):
        return _fold(builder, args[0], emit_greater)

    return types.float32(floats), emit


first_lane = _make_unary(types.float32, floats, lambda b, x: b.extract_element(x, I32(0)))


@intrinsic
def zero_below(typing_context, x, limit, value):
    """`value` where x is not below the limit, else 0."""

    def emit(context, builder, sig, args):
        x, limit, value = args
        below = builder.fcmp_ordered("<", x, emit_splat(builder, floats, limit))
        return builder.select(below, floats.constant(0.0), value)

    return floats(floats, types.float32, floats), emit


@intrinsic
def keep_lanes(typing_context, value, low, high, other):
    """`value` in lanes low <= i < high, `other` elsewhere."""

    def emit(context, builder, sig, args):
        value, low, high, other = args
        lane = ir.Constant(ints.ir, list(range(LANES)))
        clamp = [builder.trunc(x, I32) for x in (low, high)]
        inside = builder.and_(
            builder.icmp_signed(">=", lane, emit_splat(builder, ints, clamp[0])),
            builder.icmp_signed("<", lane, emit_splat(builder, ints, clamp[1])),
        )
        return builder.select(inside, value, emit_splat(builder, floats, other))

    return floats(floats, types.int64, types.int64, types.float32), emit


@intrinsic
def store_i8_of_ints(typing_context, address, value):
    """Store the low byte of each of the 16 ints."""

    def emit(context, builder, sig, args):
        narrow = builder.trunc(args[1], ir.VectorType(I8, LANES))
        builder.store(narrow, builder.inttoptr(args[0], narrow.type.as_pointer())).align = 1
        return context.get_dummy_value()

    return types.void(types.int64, ints), emit


# ---- float16, which Numba does not know: in registers where the CPU can, else with integers


def emit_half_to_float(builder, value):
    """16 float16 values (as i16 lanes) to float32, exactly."""
    if has_native_half():
        return builder.fpext(builder.bitcast(value, ir.VectorType(ir.HalfType(), LANES)), floats.ir)
    wide = builder.zext(value, ints.ir)
    sign = builder.shl(builder.and_(wide, ints.constant(0x8000)), ints.constant(16))
    magnitude = builder.shl(builder.and_(wide, ints.constant(0x7FFF)), ints.constant(13))
    # The exponent fields differ by 112; the product also makes subnormals right.
    scaled = builder.fmul(builder.bitcast(magnitude, floats.ir), floats.constant(float(2**112)))
    special = builder.icmp_unsigned(">=", magnitude, ints.constant(0x7C00 << 13))
    raised = builder.or_(magnitude, ints.constant(0x7F800000))
    bits = builder.select(special, raised, builder.bitcast(scaled, ints.ir))
    return builder.bitcast(builder.or_(bits, sign), floats.ir)


@intrinsic
def load_halfs(typing_context, address):
    """16 float16 values, as floats."""

    def emit(context, builder, sig, args):
        return emit_half_to_float(builder, emit_load(builder, halfs.ir, args[0]))

    return floats(types.int64), emit


def emit_float_to_half(builder, value):
    """16 float32 values to float16 (as i16 lanes), rounding half to even; NaN stays NaN."""
    if has_native_half():
        return builder.bitcast(builder.fptrunc(value, ir.VectorType(ir.HalfType(), LANES)), halfs.ir)
    bits = builder.bitcast(value, ints.ir)
    sign = builder.and_(builder.lshr(bits, ints.constant(16)), ints.constant(0x8000))
    magnitude = builder.and_(bits, ints.constant(0x7FFFFFFF))
    # Normal results: round the 13 dropped bits to even in integers. Subnormal ones: let a float addition round.
    odd = builder.and_(builder.lshr(magnitude, ints.constant(13)), ints.constant(1))
    rebased = builder.add(magnitude, ints.constant((-112 << 23) + 0xFFF & 0xFFFFFFFF))
    normal = builder.lshr(builder.add(rebased, odd), ints.constant(13))
    half = floats.constant(0.5)
    tiny = builder.sub(
        builder.bitcast(builder.fadd(builder.bitcast(magnitude, floats.ir), half), ints.ir),
        builder.bitcast(half, ints.ir),
    )
    result = builder.select(builder.icmp_unsigned("<", magnitude, ints.constant(113 << 23)), tiny, normal)
    overflow = builder.icmp_unsigned(">=", magnitude, ints.constant(143 << 23))
    is_nan = builder.icmp_unsigned(">", magnitude, ints.constant(0x7F800000))
    result = builder.select(overflow, ints.constant(0x7C00), result)
    result = builder.select(is_nan, ints.constant(0x7E00), result)
    return builder.trunc(builder.or_(result, sign), halfs.ir)


@intrinsic
def store_halfs(typing_context, address, value):
    """Store 16 floats as float16."""

    def emit(context, builder, sig, args):
        builder.store(
            emit_float_to_half(builder, args[1]), builder.inttoptr(args[0], halfs.ir.as_pointer())
        ).align = 1
        return context.get_dummy_value()

    return types.void(types.int64, floats), emit


# ---- several vectors as one value: an LLVM aggregate, which ends up in registers


def tile_of(vector, count):
    return types.UniTuple(vector, count)


def _make_zero_tile(vector, zero):
    @intrinsic(prefer_literal=True)
    def zero_tile(typing_context, count):
        """A tuple of `count` zero vectors."""
        tile = tile_of(vector, count.literal_value)

        def emit(context, builder, sig, args):
            return ir.Constant(ir.ArrayType(vector.ir, tile.count), [vector.constant(zero)] * tile.count)

        return tile(count), emit

    return zero_tile


zero_tile, zero_ints_tile = _make_zero_tile(floats, 0.0), _make_zero_tile(ints, 0)


@intrinsic(prefer_literal=True)
def store_tile(typing_context, tile, address, stride, n_valid, add):
    """Store (or, with `add`, add to memory) the first `n_valid` rows of a tile, `stride` bytes apart."""

    def emit(context, builder, sig, args):
        value, address, stride, n_valid, add = args
        adding = builder.icmp_signed("!=", add, I64(0))
        for t in range(sig.args[0].count):
            with builder.if_then(builder.icmp_signed("<", I64(t), n_valid)):
                row = builder.extract_value(value, t)
                at = builder.add(address, builder.mul(stride, I64(t)))
                with builder.if_else(adding) as (then, otherwise):
                    with then:
                        total = builder.fadd(emit_load(builder, floats.ir, at), row)
                        builder.store(total, builder.inttoptr(at, floats.ir.as_pointer())).align = 4
                    with otherwise:
                        builder.store(row, builder.inttoptr(at, floats.ir.as_pointer())).align = 4
        return context.get_dummy_value()

    return types.void(tile, types.int64, types.int64, types.int64, types.int64), emit


# ---- calls through a table, and addresses of arrays


@intrinsic
def call(typing_context, address, arguments):
    """Call the worker at `address` with a tuple of int64."""

    def emit(context, builder, sig, args):
        values = cgutils.unpack_tuple(builder, args[1])
        fn = builder.inttoptr(args[0], ir.FunctionType(ir.VoidType(), [I64] * len(values)).as_pointer())
        builder.call(fn, values)
        return context.get_dummy_value()

    return types.void(types.int64, types.UniTuple(types.int64, arguments.count)), emit


@intrinsic
def _pointer(typing_context, address):
    def emit(context, builder, sig, args):
        return builder.inttoptr(args[0], I64.as_pointer())

    return types.CPointer(types.int64)(types.int64), emit


@inline
def table_at(address):
    """The int64 array at an address. Its length is not known, and nobody asks."""
    return carray(_pointer(address), 1)


@inline
def rows_at(address, n, fields):
    """The int64 array [n, fields] at an address."""
    return carray(_pointer(address), (n, fields))


llvm.initialize_native_asmparser()
