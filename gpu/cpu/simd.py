"""SIMD kernels over raw addresses as LLVM IR, 16 lanes wide.

numba has no float16 arithmetic, no prefetching and no control over vectorisation, so distances are built with llvmlite.
LLVM lowers 16 lanes to one AVX-512 register, two AVX or four NEON registers. All addresses are uint64; rows and queries
are zero-padded to the width of a step, or of a tail.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import types

from ipc.native.emitted import emits

LANES = 16
WAYS = 8
KEYS_AT_ONCE = 8
_i8, _i16, _i32, _i64, _f32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_f64 = ir.DoubleType()
_FAST = ("contract", "reassoc", "nsz")
_ACCUMULATORS = 4  # independent sums hide the latency of fused multiply-adds


def at(builder: Any, address: Any, pointee: Any) -> Any:
    """Convert an integer address to a pointer."""
    return builder.inttoptr(address, ir.PointerType(pointee))


def shuffled(builder: Any, left: Any, right: Any, lanes: Iterable[int]) -> Any:
    """Select lanes of two vectors; lanes of the second one are numbered after those of the first."""
    chosen = list(lanes)
    return builder.shuffle_vector(left, right, ir.Constant(ir.VectorType(_i32, len(chosen)), chosen))


def everywhere(builder: Any, value: Any, count: int) -> Any:
    """Broadcast a value to a vector of `count` lanes."""
    kind = ir.VectorType(value.type, count)
    single = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(_i32, 0))
    return shuffled(builder, single, single, [0] * count)


def loop(
    builder: Any, begin: Any, end: Any, step: int, carried: Sequence[Any], body: Callable[..., Sequence[Any]]
) -> list[Any]:
    """Emit a loop: carried = body(position, *carried) for position = begin, begin + step, … < end.

    Returns the final carried values.
    """
    before = builder.block
    head, inside, after = (builder.append_basic_block(name) for name in ("head", "body", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    position, *phis = (builder.phi(value.type) for value in (begin, *carried))
    builder.cbranch(builder.icmp_signed("<", position, end), inside, after)
    builder.position_at_end(inside)
    changed = [*body(position, *phis), builder.add(position, ir.Constant(_i64, step))]
    for phi, first, following in zip((*phis, position), (*carried, begin), changed, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(following, inside)
    builder.branch(head)
    builder.position_at_end(after)
    return phis


def _widen_f32(builder: Any, address: Any, lanes: int) -> Any:
    return builder.load(at(builder, address, ir.VectorType(_f32, lanes)), align=4)


def _widen_f16(builder: Any, address: Any, lanes: int) -> Any:
    halves = builder.load(at(builder, address, ir.VectorType(ir.HalfType(), lanes)), align=2)
    return builder.fpext(halves, ir.VectorType(_f32, lanes))


def _float_term(widen_row: Any, row_bytes: int, squared_difference: bool) -> Any:
    """Return a term that adds products, or squared differences, one element per lane of the sum."""

    def term(builder: Any, row: Any, query: Any, position: Any, total: Any) -> Any:
        lanes = total.type.count
        x = widen_row(builder, builder.add(row, builder.mul(position, ir.Constant(_i64, row_bytes))), lanes)
        q = _widen_f32(builder, builder.add(query, builder.mul(position, ir.Constant(_i64, 4))), lanes)
        left, right = (x, q)
        if squared_difference:
            left = right = builder.fsub(x, q, flags=_FAST)
        return builder.fadd(total, builder.fmul(left, right, flags=_FAST), flags=_FAST)

    return term


def _square_term(builder: Any, row: Any, query: Any, position: Any, total: Any) -> Any:
    """Add squares of float32, one per float64 lane of the sum."""
    loaded = _widen_f32(builder, builder.add(row, builder.mul(position, ir.Constant(_i64, 4))), total.type.count)
    x = builder.fpext(loaded, total.type)
    return builder.fadd(total, builder.fmul(x, x, flags=_FAST), flags=_FAST)


def _sum(term: Any, result: Any, scalar: Any, tail: int = LANES) -> Any:
    """Return an intrinsic that sums `term` over `lanes` elements, `LANES` at a time, then `tail` at a time."""

    @emits(result, types.uint64, types.uint64, types.int64)
    def total(builder: Any, row: Any, query: Any, lanes: Any) -> Any:
        def add(a: Any, b: Any) -> Any:
            return builder.fadd(a, b, flags=_FAST)

        def sum_up(start: Any, step: int, unrolled: int, sums: list[Any]) -> tuple[Any, list[Any]]:
            def body(position: Any, _following: Any, *totals: Any) -> list[Any]:
                following = builder.add(position, ir.Constant(_i64, unrolled * step))
                places = [builder.add(position, ir.Constant(_i64, i * step)) for i in range(unrolled)]
                changed = [term(builder, row, query, here, total) for here, total in zip(places, totals, strict=False)]
                return [following, *changed, *totals[unrolled:]]

            last = builder.sub(lanes, ir.Constant(_i64, unrolled * step - 1))
            position, *totals = loop(builder, start, last, unrolled * step, [start, *sums], body)
            return position, totals

        def folded(total: Any, width: int) -> Any:
            while total.type.count > width:
                half = total.type.count // 2
                total = add(*(shuffled(builder, total, total, range(lane, lane + half)) for lane in (0, half)))
            return total

        zero = ir.Constant(ir.VectorType(scalar, LANES), None)
        position, sums = sum_up(ir.Constant(_i64, 0), LANES, _ACCUMULATORS, [zero] * _ACCUMULATORS)
        position, sums = sum_up(position, LANES, 1, sums)
        total = add(add(sums[0], sums[1]), add(sums[2], sums[3]))
        if tail < LANES:
            _, (total,) = sum_up(position, tail, 1, [folded(total, tail)])
        return builder.extract_element(folded(total, 1), ir.Constant(_i32, 0))

    return total


# Arguments: address of a row, address of a query, lanes. Float queries are float32; the lanes of float rows are a
# multiple of 16 bytes.
dot_f32 = _sum(_float_term(_widen_f32, 4, squared_difference=False), types.float32, _f32, tail=4)
l2_f32 = _sum(_float_term(_widen_f32, 4, squared_difference=True), types.float32, _f32, tail=4)
dot_f16 = _sum(_float_term(_widen_f16, 2, squared_difference=False), types.float32, _f32, tail=8)
l2_f16 = _sum(_float_term(_widen_f16, 2, squared_difference=True), types.float32, _f32, tail=8)
# The squared norm of float32 lanes, a multiple of 16, in float64; both addresses are the vector's.
square_f64 = _sum(_square_term, types.float64, _f64)


@emits(types.int64, types.uint64, types.uint32)
def visit(builder: Any, address: Any, node: Any) -> Any:
    """Return whether `node` is in the 8-entry set (uint32 × 8) at `address`; if not, insert it and evict the oldest."""
    entries_type = ir.VectorType(_i32, WAYS)
    pointer = at(builder, address, entries_type)
    entries = builder.load(pointer, align=4)
    wanted = everywhere(builder, node, WAYS)
    same = builder.bitcast(builder.icmp_unsigned("==", entries, wanted), ir.IntType(WAYS))
    seen = builder.icmp_unsigned("!=", same, ir.Constant(ir.IntType(WAYS), 0))
    entered = shuffled(builder, entries, wanted, [WAYS, *range(WAYS - 1)])
    builder.store(builder.select(seen, entries, entered), pointer, align=4)
    return builder.zext(seen, _i64)


@emits(types.void, types.uint64, types.uint64, types.int64)
def move(builder: Any, target: Any, source: Any, size: Any) -> None:
    """Copy `size` bytes between addresses that may overlap."""
    pointers = [at(builder, address, _i8) for address in (target, source)]
    kinds = [pointers[0].type, pointers[1].type, _i64]
    signature = ir.FunctionType(ir.VoidType(), [*kinds, ir.IntType(1)])
    function = builder.module.declare_intrinsic("llvm.memmove", kinds, signature)
    builder.call(function, [*pointers, size, ir.Constant(ir.IntType(1), 0)])


@emits(types.void, types.uint64)
def prefetch(builder: Any, address: Any) -> None:
    """Prefetch the cache line at `address`; any address is safe."""
    pointer = at(builder, address, _i8)
    signature = ir.FunctionType(ir.VoidType(), [pointer.type, _i32, _i32, _i32])
    function = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], signature)
    builder.call(function, [pointer, *(ir.Constant(_i32, value) for value in (0, 3, 1))])


def _load(kind: Any, result: Any) -> Any:
    @emits(result, types.uint64)
    def load(builder: Any, address: Any) -> Any:
        return builder.load(at(builder, address, kind), align=1)

    return load


# Unaligned loads.
load_f32 = _load(_f32, types.float32)
load_u32 = _load(_i32, types.uint32)
load_u64 = _load(_i64, types.uint64)


@emits(types.void, types.uint64, types.uint64)
def store_u64(builder: Any, address: Any, value: Any) -> None:
    """Store a uint64 at an address, aligned or not."""
    builder.store(value, at(builder, address, _i64), align=1)


@emits(types.int64, types.uint64, types.uint64, types.int64)
def count_below(builder: Any, keys: Any, key: Any, count: Any) -> Any:
    """Return how many of the first `count` of uint64 [8] at an address are below `key`; count may exceed 8."""
    words, mask = ir.VectorType(_i64, KEYS_AT_ONCE), ir.IntType(KEYS_AT_ONCE)
    loaded = builder.load(at(builder, keys, words), align=1)
    key, count = (everywhere(builder, value, KEYS_AT_ONCE) for value in (key, count))
    below = builder.icmp_unsigned("<", loaded, key)
    there = builder.icmp_signed("<", ir.Constant(words, [*range(KEYS_AT_ONCE)]), count)
    return builder.zext(builder.ctpop(builder.bitcast(builder.and_(below, there), mask)), _i64)


@emits(types.void, types.uint64, types.int64, types.uint64, types.int64)
def shift_in(builder: Any, keys: Any, index: Any, key: Any, chunks: Any) -> None:
    """Insert `key` at index 0..7 of uint64 [8 * chunks] at an address; later keys shift up, the last one is dropped."""
    words = ir.VectorType(_i64, KEYS_AT_ONCE)
    first = builder.load(at(builder, keys, words), align=1)
    lanes, here = ir.Constant(words, [*range(KEYS_AT_ONCE)]), everywhere(builder, index, KEYS_AT_ONCE)
    up = shuffled(builder, first, first, [0, *range(KEYS_AT_ONCE - 1)])
    moved = builder.select(builder.icmp_signed(">", lanes, here), up, first)
    moved = builder.select(builder.icmp_signed("==", lanes, here), everywhere(builder, key, KEYS_AT_ONCE), moved)
    builder.store(moved, at(builder, keys, words), align=1)

    def body(number: Any, previous: Any) -> list[Any]:
        address = builder.add(keys, builder.mul(number, ir.Constant(_i64, 8 * KEYS_AT_ONCE)))
        own = builder.load(at(builder, address, words), align=1)
        moved = shuffled(builder, previous, own, range(KEYS_AT_ONCE - 1, 2 * KEYS_AT_ONCE - 1))
        builder.store(moved, at(builder, address, words), align=1)
        return [own]

    loop(builder, ir.Constant(_i64, 1), chunks, 1, [first], body)


def _same_bits(taken: Any, kind: Any, result: Any) -> Any:
    @emits(result, taken)
    def bits(builder: Any, value: Any) -> Any:
        return builder.bitcast(value, kind)

    return bits


# Bit casts between float32 and uint32.
float_bits = _same_bits(types.float32, _i32, types.uint32)
bits_float = _same_bits(types.uint32, _f32, types.float32)
