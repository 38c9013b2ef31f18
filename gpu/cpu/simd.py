"""Vector loops over raw addresses, written as LLVM IR: 16 lanes wide, for whatever the processor at hand has.

numba offers neither float16 arithmetic nor prefetching nor a say in how a loop is cut into lanes, so the distances are
built here by llvmlite. LLVM turns 16 lanes into one AVX-512 register, two AVX or four NEON registers.
All addresses are uint64; rows and queries are padded with zeros to a multiple of 16 elements.
"""

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

LANES = 16
_i8, _i32, _i64, _f32 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
_ACCUMULATORS = 4  # independent sums hide the latency of a fused multiply-add


def _pointer(builder: Any, address: Any, pointee: Any) -> Any:
    return builder.inttoptr(address, ir.PointerType(pointee))


def _widen_f32(builder: Any, address: Any) -> Any:
    return builder.load(_pointer(builder, address, ir.VectorType(_f32, LANES)), align=4)


def _widen_f16(builder: Any, address: Any) -> Any:
    halves = builder.load(_pointer(builder, address, ir.VectorType(ir.HalfType(), LANES)), align=2)
    return builder.fpext(halves, ir.VectorType(_f32, LANES))


def _widen_i8(builder: Any, address: Any) -> Any:
    codes = builder.load(_pointer(builder, address, ir.VectorType(_i8, LANES)), align=1)
    return builder.sext(codes, ir.VectorType(_i32, LANES))


def _sum_loop(widen_row: Any, row_bytes: int, widen_query: Any, query_bytes: int, squared_difference: bool) -> Any:
    """Code generator of `sum(row · query)` or `sum((row - query)²)` over `lanes` elements (a multiple of 16)."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        row, query, lanes = args
        integer = widen_row is _widen_i8
        scalar = _i32 if integer else _f32
        vector = ir.VectorType(scalar, LANES)
        zero = ir.Constant(vector, None)
        flags = () if integer else ("contract", "reassoc", "nsz")
        add = builder.add if integer else lambda a, b: builder.fadd(a, b, flags=flags)
        multiply = builder.mul if integer else lambda a, b: builder.fmul(a, b, flags=flags)

        def term(position: Any, step: int) -> Any:
            at = builder.add(position, ir.Constant(_i64, step * LANES))
            x = widen_row(builder, builder.add(row, builder.mul(at, ir.Constant(_i64, row_bytes))))
            q = widen_query(builder, builder.add(query, builder.mul(at, ir.Constant(_i64, query_bytes))))
            if squared_difference:
                difference = builder.fsub(x, q, flags=flags)
                return multiply(difference, difference)
            return multiply(x, q)

        def loop(start: Any, limit: Any, stride: int, sums: list[Any]) -> tuple[Any, list[Any]]:
            before = builder.block
            head = builder.append_basic_block("head")
            body = builder.append_basic_block("body")
            after = builder.append_basic_block("after")
            builder.branch(head)
            builder.position_at_end(head)
            position = builder.phi(_i64)
            phis = [builder.phi(vector) for _ in sums]
            position.add_incoming(start, before)
            for phi, value in zip(phis, sums, strict=True):
                phi.add_incoming(value, before)
            following = builder.add(position, ir.Constant(_i64, stride * LANES))
            builder.cbranch(builder.icmp_signed("<=", following, limit), body, after)
            builder.position_at_end(body)
            for step in range(stride):
                phis[step].add_incoming(add(phis[step], term(position, step)), body)
            for phi in phis[stride:]:
                phi.add_incoming(phi, body)
            position.add_incoming(following, body)
            builder.branch(head)
            builder.position_at_end(after)
            return position, list(phis)

        position, sums = loop(ir.Constant(_i64, 0), lanes, _ACCUMULATORS, [zero] * _ACCUMULATORS)
        position, sums = loop(position, lanes, 1, sums)
        total = add(add(sums[0], sums[1]), add(sums[2], sums[3]))
        width = LANES
        while width > 1:  # halve: adds lane i and lane i + width/2
            width //= 2
            mask = ir.Constant(ir.VectorType(_i32, width), list(range(width)))
            upper = ir.Constant(ir.VectorType(_i32, width), list(range(width, 2 * width)))
            total = add(builder.shuffle_vector(total, total, mask), builder.shuffle_vector(total, total, upper))
        return builder.extract_element(total, ir.Constant(_i32, 0))

    return codegen


def _distance(widen_row: Any, row_bytes: int, squared_difference: bool) -> Any:
    integer = widen_row is _widen_i8
    widen_query, query_bytes = (_widen_i8, 1) if integer else (_widen_f32, 4)
    codegen = _sum_loop(widen_row, row_bytes, widen_query, query_bytes, squared_difference)
    result = types.int32 if integer else types.float32

    @intrinsic  # type: ignore[untyped-decorator]
    def distance(typing_context: Any, row: Any, query: Any, lanes: Any) -> Any:
        return result(types.uint64, types.uint64, types.int64), codegen

    return distance


dot_f32 = _distance(_widen_f32, 4, squared_difference=False)
l2_f32 = _distance(_widen_f32, 4, squared_difference=True)
dot_f16 = _distance(_widen_f16, 2, squared_difference=False)
l2_f16 = _distance(_widen_f16, 2, squared_difference=True)
dot_i8 = _distance(_widen_i8, 1, squared_difference=False)


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(typing_context: Any, address: Any) -> Any:
    """Ask for the cache line at `address`; a hint, so any address is safe."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = _pointer(builder, args[0], _i8)
        signature = ir.FunctionType(ir.VoidType(), [pointer.type, _i32, _i32, _i32])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], signature)
        builder.call(function, [pointer, *(ir.Constant(_i32, value) for value in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(types.uint64), codegen


def _loader(result: Any, pointee: Any) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def load(typing_context: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return builder.load(_pointer(builder, args[0], pointee), align=1)

        return result(types.uint64), codegen

    return load


load_f32 = _loader(types.float32, _f32)
load_u32 = _loader(types.uint32, _i32)


@intrinsic  # type: ignore[untyped-decorator]
def float_bits(typing_context: Any, value: Any) -> Any:
    """The bit pattern of a float32, as uint32."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _i32)

    return types.uint32(types.float32), codegen


@intrinsic  # type: ignore[untyped-decorator]
def bits_float(typing_context: Any, bits: Any) -> Any:
    """The float32 of a uint32 bit pattern."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _f32)

    return types.float32(types.uint32), codegen
