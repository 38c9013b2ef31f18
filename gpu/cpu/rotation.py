"""Random rotation in O(D' log D'): rounds of random signs, Walsh-Hadamard transforms and a mixing of the halves.

A round multiplies by signs, transforms the first (in odd rounds the last) 2ⁿ dimensions and, if 2ⁿ < D', mixes the
first half with the second. `signs`, float32 [ROUNDS, D'], includes the scale factors.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types

from gpu.compiled import compiled
from gpu.cpu.simd import LANES, at, shuffled
from ipc.native.emitted import emits

_BLOCK = 64  # D' is a multiple of it
_vector = ir.VectorType(ir.FloatType(), LANES)


def _lanes_transformed(builder: Any, x: Any) -> Any:
    """Emit the transform of a register's 16 lanes."""
    for step in (1, 2, 4, 8):
        other = shuffled(builder, x, x, [i ^ step for i in range(LANES)])
        signs = ir.Constant(_vector, [-1.0 if i & step else 1.0 for i in range(LANES)])
        x = builder.fadd(other, builder.fmul(x, signs))
    return x


def _two_butterfly_steps(builder: Any, values: list[Any]) -> list[Any]:
    """Emit two butterfly steps over four registers: of adjacent ones, then of every second one."""
    for pairs in (((0, 1), (2, 3)), ((0, 2), (1, 3))):
        for left, right in pairs:
            a, b = values[left], values[right]
            values[left], values[right] = builder.fadd(a, b), builder.fsub(a, b)
    return values


@emits(types.void, types.uint64, types.uint64)
def _begin_block(builder: Any, address: Any, factors: Any) -> None:
    """Multiply 64 float32 in place by those at `factors`, then transform them."""
    steps = [ir.Constant(ir.IntType(64), 4 * LANES * number) for number in range(4)]
    places = [at(builder, builder.add(address, step), _vector) for step in steps]
    values = []
    for pointer, step in zip(places, steps, strict=True):
        factor = builder.load(at(builder, builder.add(factors, step), _vector), align=4)
        values.append(_lanes_transformed(builder, builder.fmul(builder.load(pointer, align=4), factor)))
    for pointer, value in zip(places, _two_butterfly_steps(builder, values), strict=True):
        builder.store(value, pointer, align=4)


@emits(types.void, types.uint64, types.uint64)
def _two_steps(builder: Any, address: Any, stride: Any) -> None:
    """Do two butterfly steps on 16 float32 at each of four addresses `stride` bytes apart."""
    places = []
    for _ in range(4):
        places.append(at(builder, address, _vector))
        address = builder.add(address, stride)
    values = _two_butterfly_steps(builder, [builder.load(pointer, align=4) for pointer in places])
    for pointer, value in zip(places, values, strict=True):
        builder.store(value, pointer, align=4)


@emits(types.void, types.uint64, types.uint64)
def _butterfly(builder: Any, left: Any, right: Any) -> None:
    """Replace 16 float32 at each of two addresses by their sums and differences."""
    a, b = (builder.load(at(builder, address, _vector), align=4) for address in (left, right))
    builder.store(builder.fadd(a, b), at(builder, left, _vector), align=4)
    builder.store(builder.fsub(a, b), at(builder, right, _vector), align=4)


@emits(types.void, types.uint64, types.uint64)
def _multiply(builder: Any, target: Any, factors: Any) -> None:
    """Multiply 16 float32 at `target` by those at `factors`."""
    a, b = (builder.load(at(builder, address, _vector), align=4) for address in (target, factors))
    builder.store(builder.fmul(a, b), at(builder, target, _vector), align=4)


@compiled
def rotate(rounds: int, dims: int, signs: Any, target: Any) -> None:
    """Rotate float32 [D'] at address `target` in place; `signs` is the address of float32 [rounds, D']."""
    size = 1
    while 2 * size <= dims:
        size *= 2
    step = np.uint64(4 * LANES)
    for number in range(rounds):
        factors = signs + np.uint64(4 * number * dims)
        first = 0 if number % 2 == 0 else dims - size
        for j in range(0, dims - size, LANES):  # dimensions that this round does not transform
            offset = np.uint64(4 * (j if j < first else j + size))
            _multiply(target + offset, factors + offset)
        begin = target + np.uint64(4 * first)
        for j in range(0, 4 * size, 4 * _BLOCK):
            _begin_block(begin + np.uint64(j), factors + np.uint64(4 * first + j))
        half = _BLOCK
        while half < size:
            wide = 4 * half if 2 * half < size else 2 * half
            for block in range(0, size, wide):
                left = begin + np.uint64(4 * block)
                for _ in range(0, half, LANES):
                    if wide == 4 * half:
                        _two_steps(left, np.uint64(4 * half))
                    else:
                        _butterfly(left, left + np.uint64(4 * half))
                    left += step
            half = wide
        if size < dims:
            left, right = target, target + np.uint64(2 * dims)
            for _ in range(0, dims // 2, LANES):
                _butterfly(left, right)
                left += step
                right += step
