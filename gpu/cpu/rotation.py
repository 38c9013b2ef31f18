"""A random rotation in D' log D' steps: rounds of random signs, Walsh-Hadamard transforms and a mixing of the halves.

A round multiplies by signs, transforms the first (in the next round the last) 2ⁿ dimensions and, where these are not
all, mixes the first half with the second. `signs` float32 [ROUNDS, D'] has the scales of all this in it.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from gpu.compiled import compiled
from gpu.cpu.simd import LANES

_f32, _i32 = ir.FloatType(), ir.IntType(32)
_vector = ir.VectorType(_f32, LANES)


def _at(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, ir.PointerType(_vector))


@intrinsic  # type: ignore[untyped-decorator]
def _transform_lanes(typing_context: Any, address: Any) -> Any:
    """The transform of 16 float32 in place."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        x = builder.load(_at(builder, args[0]), align=4)
        for step in (1, 2, 4, 8):
            other = ir.Constant(ir.VectorType(_i32, LANES), [i ^ step for i in range(LANES)])
            signs = ir.Constant(_vector, [-1.0 if i & step else 1.0 for i in range(LANES)])
            x = builder.fadd(builder.shuffle_vector(x, x, other), builder.fmul(x, signs))
        builder.store(x, _at(builder, args[0]), align=4)
        return context.get_dummy_value()

    return types.void(types.uint64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _butterfly(typing_context: Any, left: Any, right: Any) -> Any:
    """16 float32 at each of two addresses become their sums and their differences."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        a, b = (builder.load(_at(builder, address), align=4) for address in args)
        builder.store(builder.fadd(a, b), _at(builder, args[0]), align=4)
        builder.store(builder.fsub(a, b), _at(builder, args[1]), align=4)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _multiply(typing_context: Any, target: Any, factors: Any) -> Any:
    """16 float32 at `target` times those at `factors`."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        a, b = (builder.load(_at(builder, address), align=4) for address in args)
        builder.store(builder.fmul(a, b), _at(builder, args[0]), align=4)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), codegen


@compiled
def rotate(rounds: int, dims: int, signs: Any, target: Any) -> None:
    """Rotate float32 [D'] at address `target` in place; `signs` is the address of float32 [rounds, D']."""
    size = 1
    while 2 * size <= dims:
        size *= 2
    step = np.uint64(4 * LANES)
    for number in range(rounds):
        for j in range(0, dims, LANES):
            _multiply(target + np.uint64(4 * j), signs + np.uint64(4 * (number * dims + j)))
        begin = target if number % 2 == 0 else target + np.uint64(4 * (dims - size))
        for j in range(0, size, LANES):
            _transform_lanes(begin + np.uint64(4 * j))
        half = LANES
        while half < size:
            for block in range(0, size, 2 * half):
                left = begin + np.uint64(4 * block)
                right = left + np.uint64(4 * half)
                for _ in range(0, half, LANES):
                    _butterfly(left, right)
                    left += step
                    right += step
            half *= 2
        if size < dims:
            left, right = target, target + np.uint64(2 * dims)
            for _ in range(0, dims // 2, LANES):
                _butterfly(left, right)
                left += step
                right += step
