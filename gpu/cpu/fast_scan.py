"""Fast scan: distance estimates of 32 neighbours at a time from their RaBitQ codes (`gpu.index.data`), as LLVM IR.

A query's lookup table has, for each group of four dimensions, the sixteen sums ±q₀±q₁±q₂±q₃ as bytes; four bits of a
code select one. A byte shuffle does 16, 32 or 64 look-ups per instruction; without one, bytes are looked up singly.
"""

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba.core import config, types

from gpu.compiled import compiled
from gpu.cpu.simd import WAYS, at, everywhere, load_f32, loop, shuffled
from ipc.native.emitted import emits

_i1, _i8, _i16, _i32, _i64, _f32 = (*(ir.IntType(bits) for bits in (1, 8, 16, 32, 64)), ir.FloatType())
_GROUP = 32
_LINE = 64  # bytes: four groups of four dimensions
_bytes, _words = ir.VectorType(_i8, _LINE), ir.VectorType(_i16, _LINE // 2)
_floats = ir.VectorType(_f32, 16)
_FAST = ("contract",)
_LINES_A_SUM = 64  # 256 groups: the most bytes of up to 255 whose sum fits into 16 bits


def _vector(element: Any, count: int) -> Any:
    return ir.VectorType(element, count)


def _offset(builder: Any, address: Any, count: int) -> Any:
    return builder.add(address, ir.Constant(_i64, count))


def _same(vector: Any, value: int) -> Any:
    return ir.Constant(vector, [value] * vector.count)


def _function(builder: Any, name: str, vector: Any, arguments: int) -> Any:
    """Declare LLVM's lane-wise function of `arguments` float32 vectors."""
    kind = ir.FunctionType(vector, [vector] * arguments)
    return builder.module.declare_intrinsic(f"{name}.v{vector.count}f32", (), kind)


def _look_up(name: str, width: int) -> Callable[[Any, Any, Any], Any]:
    """Return a generator of 64 look-ups with an instruction that does `width`."""
    part = _vector(_i8, width)

    def look_up(builder: Any, table: Any, places: Any) -> Any:
        function = builder.module.declare_intrinsic(name, (), ir.FunctionType(part, [part, part]))
        parts = []
        for begin in range(0, _LINE, width):
            lanes = range(begin, begin + width)
            both = [shuffled(builder, vector, vector, lanes) for vector in (table, places)]
            parts.append(builder.call(function, both))
        while len(parts) > 1:
            count = 2 * parts[0].type.count
            parts = [shuffled(builder, a, b, range(count)) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    return look_up


def look_up_each(builder: Any, table: Any, places: Any) -> Any:
    """Emit 64 single look-ups."""
    entries = ir.Constant(_bytes, ir.Undefined)
    for lane in range(_LINE):
        here = ir.Constant(_i32, lane)
        index = builder.add(builder.zext(builder.extract_element(places, here), _i32), ir.Constant(_i32, lane & ~15))
        entries = builder.insert_element(entries, builder.extract_element(table, index), here)
    return entries


def _features() -> dict[str, bool]:
    """Return numba's target features: the host's, or those of NUMBA_CPU_FEATURES."""
    named: str | None = config.CPU_FEATURES
    if named is None:
        return dict(llvm.get_host_cpu_features())
    return {feature[1:]: feature.startswith("+") for feature in named.split(",")}


def _best_look_up() -> Callable[[Any, Any, Any], Any]:
    features = _features()
    for feature, name, width in (
        ("avx512bw", "llvm.x86.avx512.pshuf.b.512", 64),
        ("avx2", "llvm.x86.avx2.pshuf.b", 32),
        ("ssse3", "llvm.x86.ssse3.pshuf.b.128", 16),
        ("neon", "llvm.aarch64.neon.tbl1.v16i8", 16),
    ):
        if features.get(feature):
            return _look_up(name, width)
    return look_up_each


def _folded(builder: Any, words: Any) -> Any:
    """Emit the sum of a register's four quarters: each holds eight pairs of neighbours for different groups."""
    half = builder.add(*(shuffled(builder, words, words, range(begin, begin + 16)) for begin in (0, 16)))
    return builder.add(*(shuffled(builder, half, half, range(begin, begin + 8)) for begin in (0, 8)))


def scan_by(look_up: Callable[[Any, Any, Any], Any]) -> Any:
    """Return the intrinsic `add_sums` for a look-up function."""

    @emits(types.void, types.uint64, types.uint64, types.int64, types.int64, types.float32, types.uint64)
    def add_sums(builder: Any, codes: Any, table: Any, begin: Any, end: Any, weight: Any, sums: Any) -> None:
        weights = everywhere(builder, weight, 16)

        def body(line: Any, *totals: Any) -> list[Any]:
            offset = builder.mul(line, ir.Constant(_i64, _LINE))
            code = builder.load(at(builder, builder.add(codes, offset), _bytes), align=1)
            entries = builder.load(at(builder, builder.add(table, offset), _bytes), align=1)
            low = builder.and_(code, _same(_bytes, 15))
            high = builder.lshr(builder.bitcast(code, _words), _same(_words, 4))
            high = builder.and_(builder.bitcast(high, _bytes), _same(_bytes, 15))
            # Sum whole words, and upper bytes alone: the latter, shifted, are subtracted from the former at the end.
            looked_up = [builder.bitcast(look_up(builder, entries, half), _words) for half in (low, high)]
            terms = (term for words in looked_up for term in (words, builder.lshr(words, _same(_words, 8))))
            return [builder.add(total, term) for total, term in zip(totals, terms, strict=True)]

        totals = loop(builder, begin, end, 1, [ir.Constant(_words, None)] * 4, body)
        for number in (0, 1):
            odd = _folded(builder, totals[2 * number + 1])
            even = builder.sub(_folded(builder, totals[2 * number]), builder.shl(odd, _same(odd.type, 8)))
            both = shuffled(builder, even, odd, [lane for pair in range(8) for lane in (pair, 8 + pair)])
            pointer = at(builder, _offset(builder, sums, 64 * number), _floats)
            product = builder.fmul(weights, builder.uitofp(both, _floats), flags=_FAST)
            total = builder.fadd(builder.load(pointer, align=4), product, flags=_FAST)
            builder.store(total, pointer, align=4)

    return add_sums


add_sums = scan_by(_best_look_up())
"""Add the weighted table entries of 32 codes in lines begin..end (64 at most) to float32 [32] at `sums`."""


@emits(types.void, types.uint64, types.uint64, types.float32, types.float32, types.float32)
def _combine(builder: Any, sums: Any, factors: Any, base: Any, step: Any, offset: Any) -> None:
    """Replace float32 [32] at `sums` by base + A + F · (offset + step · sum), with A, F float32 [32] at `factors`."""
    base, step, offset = (everywhere(builder, value, 16) for value in (base, step, offset))
    for begin in (0, 64):
        pointer = at(builder, _offset(builder, sums, begin), _floats)
        a, f = (
            builder.load(at(builder, _offset(builder, factors, begin + skipped), _floats), align=4)
            for skipped in (0, 4 * _GROUP)
        )
        product = builder.fadd(offset, builder.fmul(step, builder.load(pointer, align=4), flags=_FAST), flags=_FAST)
        estimate = builder.fadd(builder.fadd(base, a), builder.fmul(f, product, flags=_FAST), flags=_FAST)
        builder.store(estimate, pointer, align=4)


@emits(types.int64, types.uint64, types.float32)
def below(builder: Any, values: Any, limit: Any) -> Any:
    """Return a bit mask of the float32 [32] at an address that are below `limit`."""
    loaded = builder.load(at(builder, values, _vector(_f32, _GROUP)), align=4)
    under = builder.fcmp_ordered("<", loaded, everywhere(builder, limit, _GROUP))
    return builder.zext(builder.bitcast(under, _i32), _i64)


@emits(types.int64, types.int64)
def lowest_bit(builder: Any, bits: Any) -> Any:
    """Return the index of the lowest set bit of a non-zero word."""
    return builder.cttz(bits, ir.Constant(_i1, 1))


@emits(types.int64, types.uint64, types.uint32)
def was_visited(builder: Any, address: Any, node: Any) -> Any:
    """Return whether `node` is in the 8-entry set (uint32 × 8) at `address`. `simd.visit` also inserts it."""
    entries = builder.load(at(builder, address, _vector(_i32, WAYS)), align=4)
    same = builder.icmp_unsigned("==", entries, everywhere(builder, node, WAYS))
    seen = builder.icmp_unsigned("!=", builder.bitcast(same, ir.IntType(WAYS)), ir.Constant(ir.IntType(WAYS), 0))
    return builder.zext(seen, _i64)


@emits(types.UniTuple(types.float32, 2), types.uint64, types.int64, types.uint64)
def _write_widths(builder: Any, query: Any, dims: Any, widths: Any) -> Any:
    """Write |q₀|+|q₁|+|q₂|+|q₃| of every four of float32 [dims] at `query` to float32 [dims / 4] at `widths`.

    Returns their maximum and their sum.
    """
    absolute = _function(builder, "llvm.fabs", _floats, 1)

    def pairs(left: Any, right: Any) -> Any:
        """Emit the sums of adjacent pairs of 32 lanes."""
        return builder.fadd(*(shuffled(builder, left, right, range(begin, 32, 2)) for begin in (0, 1)))

    def body(position: Any, most: Any, total: Any) -> list[Any]:
        begin = builder.add(query, builder.mul(position, ir.Constant(_i64, 4)))
        parts = [builder.load(at(builder, _offset(builder, begin, 64 * i), _floats), align=4) for i in range(4)]
        parts = [builder.call(absolute, [part]) for part in parts]
        sums = pairs(pairs(*parts[:2]), pairs(*parts[2:]))
        builder.store(sums, at(builder, builder.add(widths, position), _floats), align=4)
        greater = builder.call(_function(builder, "llvm.maxnum", _floats, 2), [most, sums])
        return [greater, builder.fadd(total, sums)]

    most, total = loop(builder, ir.Constant(_i64, 0), dims, 64, [ir.Constant(_floats, None)] * 2, body)
    for half in (8, 4, 2, 1):
        parts = [[shuffled(builder, v, v, range(b, b + half)) for b in (0, half)] for v in (most, total)]
        greater = _function(builder, "llvm.maxnum", _vector(_f32, half), 2)
        most, total = builder.call(greater, parts[0]), builder.fadd(*parts[1])
    return [builder.extract_element(value, ir.Constant(_i32, 0)) for value in (most, total)]


@emits(types.void, types.uint64, types.float32, types.float32, types.uint64)
def _write_entries(builder: Any, query: Any, width: Any, inverse: Any, table: Any) -> None:
    """Write sixteen bytes to `table`: (sum + width) · inverse, rounded, for the sums of the four float32 at `query`."""
    total = everywhere(builder, width, 16)
    for i in range(4):
        value = builder.load(at(builder, _offset(builder, query, 4 * i), _f32), align=4)
        signs = ir.Constant(_floats, [1.0 if entry >> i & 1 else -1.0 for entry in range(16)])
        total = builder.fadd(total, builder.fmul(signs, everywhere(builder, value, 16), flags=_FAST), flags=_FAST)
    scaled = builder.fmul(total, everywhere(builder, inverse, 16), flags=_FAST)
    rounded = builder.fadd(scaled, ir.Constant(_floats, [0.5] * 16), flags=_FAST)
    entries = builder.trunc(builder.fptosi(rounded, _vector(_i32, 16)), _vector(_i8, 16))
    builder.store(entries, at(builder, table, entries.type), align=1)


@compiled
def write_table(rotated: Any, dims: int, table: Any) -> Any:
    """Write the lookup table, uint8 [4·D'] at `table`, of a rotated query, float32 [D'] at an address.

    Returns (step, offset): Σ ±qᵢ = offset + step · Σ entries.
    """
    # The table's last quarter stores the widths temporarily: entries of a group never overwrite widths still needed.
    widths = table + np.uint64(3 * dims)
    widest, total = _write_widths(rotated, dims, widths)
    step = max(np.float32(2) * widest / np.float32(254.5), np.float32(1e-30))
    inverse = np.float32(1) / step
    for j in range(0, dims, 4):
        width = load_f32(widths + np.uint64(j))
        _write_entries(rotated + np.uint64(4 * j), width, inverse, table + np.uint64(4 * j))
    return step, -total


@compiled
def estimate(codes: Any, table: Any, dims: int, bits: int, base: Any, step: Any, offset: Any, out: Any) -> None:
    """Write the estimated distances of 32 neighbours to float32 [32] at address `out`.

    codes: address of their part of a node's block. table, step, offset: from `write_table`. base: the node's distance.
    """
    lines = dims // 16
    _clear(out)
    weight = np.float32(1)
    for _ in range(bits):
        for begin in range(0, lines, _LINES_A_SUM):
            add_sums(codes, table, begin, min(begin + _LINES_A_SUM, lines), weight, out)
        codes += np.uint64(4 * dims)
        weight *= np.float32(2)
    _combine(out, codes, base, step, offset * (weight - np.float32(1)))


@emits(types.void, types.uint64)
def _clear(builder: Any, address: Any) -> None:
    """Set float32 [32] at an address to zero."""
    whole = _vector(_f32, _GROUP)
    builder.store(ir.Constant(whole, None), at(builder, address, whole), align=4)
