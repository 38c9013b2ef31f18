"""Instructions of the interpreter: integers, floats, comparisons, memory, warp shuffles and votes."""

from typing import Any

import numpy as np

from benchmarks.machine_code.interpreter import COMPARE, MASK32, WARP, Interpreter, Lanes, Warp
from benchmarks.machine_code.listing import Instruction, Operand


def _signed(value: Lanes) -> Lanes:
    return value.astype(np.uint32).view(np.int32).astype(np.int64)


class Arithmetic(Interpreter):
    # ---- integers

    def _sum(self, w: Warp, on: Lanes, one: Instruction) -> None:
        """IADD3: up to two carries out and, with X, two in; an inverted term is part of a subtraction."""
        target, *rest = one.operands
        carries = []
        while rest[0].kind in ("P", "UP"):
            carries.append(rest.pop(0))
        terms, taken = rest[:3], rest[3:]
        total = np.zeros(WARP, np.uint64)
        for term in terms:
            value = self._raw(w, term)
            if term.inverted or (term.negated and "X" in one.modifiers):
                value = ~value
            elif term.negated:
                value = np.uint32(0) - value
                # -0 carries, like ~0 + 1
                total += np.where(value == 0, np.uint64(1) << np.uint64(32), np.uint64(0)) if carries else np.uint64(0)
            total += value.astype(np.uint64)
        for carry in taken:
            total += self._pred(w, carry).astype(np.uint64)
        self._put(w, on, target, total & MASK32)
        for i, carry in enumerate(carries):
            self._put_pred(w, on, carry, (total >> np.uint64(32)) > i)

    _iadd3 = _uiadd3 = _sum

    def _viadd(self, w: Warp, on: Lanes, one: Instruction) -> None:
        target, a, b = one.operands
        self._put(w, on, target, self._int(w, a) + self._int(w, b))

    def _imad(self, w: Warp, on: Lanes, one: Instruction) -> None:
        operands = [o for o in one.operands if o.kind not in ("P", "UP")]
        taken = [o for o in one.operands[1:] if o.kind in ("P", "UP")]
        target, a, b, c = operands
        modifiers = one.modifiers
        if "WIDE" in modifiers or "HI" in modifiers:
            left, right = self._int(w, a), self._int(w, b)
            if "U32" in modifiers:
                product = left.astype(np.uint64) * right.astype(np.uint64)
            else:
                product = (_signed(left) * _signed(right)).view(np.uint64)
            if "HI" in modifiers:
                total = product + self._wide(w, c)  # as in the first step of division: the addend has 64 bits
                self._put(w, on, target, total >> np.uint64(32))
                return
            added = self._wide(w, c)
            total = product + added
            self._put_wide(w, on, target, total)
            for carry in taken:
                self._put_pred(w, on, carry, total < product)
            return
        total = self._int(w, a).astype(np.uint64) * self._int(w, b).astype(np.uint64) + self._int(w, c).astype(
            np.uint64
        )
        if "X" in modifiers:
            if c.inverted:
                pass
            for carry in taken:
                total = total + self._pred(w, carry).astype(np.uint64)
        self._put(w, on, target, total & MASK32)

    _uimad = _imad

    def _lea(self, w: Warp, on: Lanes, one: Instruction) -> None:
        target, *rest = one.operands
        carries = []
        while rest[0].kind in ("P", "UP"):
            carries.append(rest.pop(0))
        taken = [o for o in rest if o.kind in ("P", "UP")]
        values = [o for o in rest if o.kind not in ("P", "UP")]
        a, b, shift = values[0], values[1], np.uint64(values[-1].number)
        if "HI" in one.modifiers:
            low = self._int(w, a).astype(np.uint64)
            if "SX32" in one.modifiers:
                high = np.where(low & np.uint64(1 << 31), MASK32, np.uint64(0))
            else:
                high = self._int(w, values[2]).astype(np.uint64)
            shifted = (low | high << np.uint64(32)) >> (np.uint64(32) - shift) & MASK32
        else:
            shifted = self._int(w, a).astype(np.uint64) << shift & MASK32
        total = shifted + self._int(w, b).astype(np.uint64)
        for carry in taken:
            total += self._pred(w, carry).astype(np.uint64)
        self._put(w, on, target, total & MASK32)
        for carry in carries:
            self._put_pred(w, on, carry, (total >> np.uint64(32)) > 0)

    _ulea = _lea

    def _lop3(self, w: Warp, on: Lanes, one: Instruction) -> None:
        operands = list(one.operands)
        out = operands.pop(0) if operands[0].kind in ("P", "UP") else None
        target, a, b, c, table = operands[:5]
        if target.kind in ("P", "UP"):
            raise NotImplementedError(one.line)
        value = _table3(table.number, self._int(w, a), self._int(w, b), self._int(w, c))
        self._put(w, on, target, value)
        if out is not None:
            self._put_pred(w, on, out, value != 0)

    _ulop3 = _lop3

    def _plop3(self, w: Warp, on: Lanes, one: Instruction) -> None:
        first, second, a, b, c, table = one.operands[:6]
        bits = [np.where(self._pred(w, o), np.uint32(0xFFFFFFFF), np.uint32(0)) for o in (a, b, c)]
        self._put_pred(w, on, first, _table3(table.number, *bits) != 0)
        if second.number != 7:
            self._put_pred(w, on, second, _table3(one.operands[6].number, *bits) != 0)

    _uplop3 = _plop3

    def _shf(self, w: Warp, on: Lanes, one: Instruction) -> None:
        target, low, by, high = one.operands
        modifiers = one.modifiers
        wide = self._int(w, low).astype(np.uint64) | self._int(w, high).astype(np.uint64) << np.uint64(32)
        most = 63 if "U64" in modifiers or "S64" in modifiers else 32
        count = self._int(w, by)
        count = (count & np.uint32(31)) if "W" in modifiers else np.minimum(count, np.uint32(most))
        count = count.astype(np.uint64)
        if modifiers[0] == "L":
            value = wide << count
        elif "S32" in modifiers and "HI" in modifiers:
            value = (_signed(self._int(w, high)) >> np.minimum(count, np.uint64(31)).astype(np.int64)).view(np.uint64)
            self._put(w, on, target, value & MASK32)
            return
        elif "S64" in modifiers:
            value = (wide.view(np.int64) >> count.astype(np.int64)).view(np.uint64)
        else:
            value = wide >> count
        self._put(w, on, target, (value >> np.uint64(32) if "HI" in modifiers else value) & MASK32)

    _ushf = _shf

    def _isetp(self, w: Warp, on: Lanes, one: Instruction) -> None:
        first, second, a, b, *more = one.operands
        modifiers = one.modifiers
        left, right = self._int(w, a), self._int(w, b)
        if "U32" not in modifiers:
            left, right = _signed(left), _signed(right)
        name = next(part for part in modifiers if part in COMPARE)
        value = COMPARE[name](left, right)
        if "EX" in modifiers:  # if equal, the result of the lower halves
            lower = self._pred(w, more[1])
            equal = left == right
            value = equal & lower if name == "EQ" else ~equal | lower if name == "NE" else np.where(equal, lower, value)
        self._combine(w, on, one, first, second, value, more[0])

    _uisetp = _isetp

    def _combine(
        self, w: Warp, on: Lanes, one: Instruction, first: Operand, second: Operand, value: Lanes, other: Operand
    ) -> None:
        by = self._pred(w, other)
        join = {"AND": np.logical_and, "OR": np.logical_or, "XOR": np.logical_xor}
        how = next(part for part in one.modifiers if part in join)
        both = join[how](value, by), join[how](~value, by)
        self._put_pred(w, on, first, both[0])
        self._put_pred(w, on, second, both[1])

    def _imnmx(self, w: Warp, on: Lanes, one: Instruction) -> None:
        target, a, b, least = one.operands[:4]
        left, right = self._int(w, a), self._int(w, b)
        less = left < right if "U32" in one.modifiers else _signed(left) < _signed(right)
        self._put(w, on, target, np.where(less == self._pred(w, least), left, right))

    _vimnmx = _uimnmx = _imnmx

    def _viaddmnmx(self, w: Warp, on: Lanes, one: Instruction) -> None:
        target, a, b, c, least = one.operands
        total, other = self._int(w, a) + self._int(w, b), self._int(w, c)
        less = total < other if "U32" in one.modifiers else _signed(total) < _signed(other)
        self._put(w, on, target, np.where(less == self._pred(w, least), total, other))

    def _popc(self, w: Warp, on: Lanes, one: Instruction) -> None:
        value = self._int(w, one.operands[1])
        self._put(w, on, one.operands[0], np.array([int(x).bit_count() for x in value], np.uint32))

    _upopc = _popc

    def _flo(self, w: Warp, on: Lanes, one: Instruction) -> None:
        assert "U32" in one.modifiers
        value = self._int(w, one.operands[1])
        found = [int(x).bit_length() - 1 if x else -1 for x in value]
        if "SH" in one.modifiers:
            found = [31 - x if x >= 0 else -1 for x in found]
        self._put(w, on, one.operands[0], np.array(found, np.int64).astype(np.uint32))

    _uflo = _flo

    def _brev(self, w: Warp, on: Lanes, one: Instruction) -> None:
        value = self._int(w, one.operands[1])
        self._put(w, on, one.operands[0], np.array([int(f"{int(x):032b}"[::-1], 2) for x in value], np.uint32))

    _ubrev = _brev

    # ---- floats

    def _fadd(self, w: Warp, on: Lanes, one: Instruction) -> None:
        target, a, b = one.operands
        self._put_float(w, on, target, self._float(w, a) + self._float(w, b))

    def _fmul(self, w: Warp, on: Lanes, one: Instruction) -> None:
        target, a, b = one.operands
        self._put_float(w, on, target, self._float(w, a) * self._float(w, b))

    def _ffma(self, w: Warp, on: Lanes, one: Instruction) -> None:
        target, a, b, c = one.operands
        product = self._float(w, a).astype(np.float64) * self._float(w, b).astype(np.float64)
        self._put_float(w, on, target, (product + self._float(w, c).astype(np.float64)).astype(np.float32))

    def _hadd2(self, w: Warp, on: Lanes, one: Instruction) -> None:
        """Widen a half: the only use here is -0 + one of two halves."""
        target, zero, source = one.operands
        assert "F32" in one.modifiers
        assert zero.number == 255
        halves = self._raw(w, source).view(np.uint16)[int("H1_H1" in source.parts) :: 2]
        self._put_float(w, on, target, halves.view(np.float16))

    def _fsetp(self, w: Warp, on: Lanes, one: Instruction) -> None:
        first, second, a, b, other = one.operands
        left, right = self._float(w, a), self._float(w, b)
        name = next(part for part in one.modifiers if part[:2] in COMPARE)
        value = COMPARE[name[:2]](left, right)
        if name.endswith("U"):  # or unordered
            value = value | np.isnan(left) | np.isnan(right)
        self._combine(w, on, one, first, second, value, other)

    def _put_float(self, w: Warp, on: Lanes, target: Operand, value: Lanes) -> None:
        self._put(w, on, target, value.astype(np.float32).view(np.uint32))

    def _i2f(self, w: Warp, on: Lanes, one: Instruction) -> None:
        value = self._int(w, one.operands[1])
        number = value if "U32" in one.modifiers else _signed(value)
        found = number.astype(np.float32)
        if "RP" in one.modifiers:
            found = np.where(found.astype(np.float64) < number, np.nextafter(found, np.float32(np.inf)), found)
        self._put_float(w, on, one.operands[0], found)

    _i2fp = _i2f

    def _f2i(self, w: Warp, on: Lanes, one: Instruction) -> None:
        value = np.trunc(self._float(w, one.operands[1]).astype(np.float64))
        self._put(w, on, one.operands[0], np.clip(value, 0, 2**32 - 1).astype(np.uint64))

    def _mufu(self, w: Warp, on: Lanes, one: Instruction) -> None:
        assert one.modifiers[0] == "RCP"
        with np.errstate(divide="ignore"):
            self._put_float(w, on, one.operands[0], np.float32(1) / self._float(w, one.operands[1]))

    # ---- warp shuffles and votes

    def _vote(self, w: Warp, on: Lanes, one: Instruction) -> None:
        """The participating lanes are the converged ones."""
        value = self._pred(w, one.operands[-1])
        bits = sum(1 << lane for lane in range(WARP) if value[lane] and on[lane])
        for o in one.operands[:-1]:
            if o.kind in ("R", "UR"):
                self._put(w, on, o, np.full(WARP, bits, np.uint32))
            else:
                voted = (value & on).any() if "ANY" in one.modifiers else (value | ~on).all()
                self._put_pred(w, on, o, np.full(WARP, voted))

    _voteu = _vote

    def _shfl(self, w: Warp, on: Lanes, one: Instruction) -> None:
        assert one.modifiers[0] in ("BFLY", "IDX"), one.line
        out, target, source, by, _ = one.operands
        lanes, at = np.arange(WARP, dtype=np.uint32), self._int(w, by)
        lanes = lanes ^ at if one.modifiers[0] == "BFLY" else at % np.uint32(WARP)
        self._put(w, on, target, self._raw(w, source)[lanes])
        self._put_pred(w, on, out, np.ones(WARP, bool))

    def _match(self, w: Warp, on: Lanes, one: Instruction) -> None:
        assert one.modifiers == ("ANY",)
        value = self._raw(w, one.operands[-1])
        bits = [sum(1 << i for i in np.flatnonzero(on & (value == mine))) for mine in value]
        self._put(w, on, one.operands[-2], np.array(bits, np.uint32))

    def _redux(self, w: Warp, on: Lanes, one: Instruction) -> None:
        value = self._raw(w, one.operands[1])[on]
        if "S32" in one.modifiers:
            raise NotImplementedError(one.line)
        folds = {"OR": np.bitwise_or, "MAX": np.maximum, "MIN": np.minimum, "SUM": np.add}
        found = next((folds[name].reduce(value) for name in one.modifiers if name in folds), None)
        self._put(w, on, one.operands[0], np.full(WARP, found, np.uint32))

    # ---- memory

    def _address(self, w: Warp, o: Operand, shared: bool) -> Lanes:
        total = np.zeros(WARP, np.int64)
        for part in o.parts:
            if part.kind == "#":
                number = part.number if part.number < 1 << 63 else part.number - (1 << 64)
                total += -number if part.negated else number
            elif "64" in part.parts or (not shared and not part.parts):
                total += self._wide(w, part).view(np.int64)
            else:
                scale = next((int(name[1:]) for name in part.parts if name[:1] == "X"), 1)
                total += scale * self._raw(w, part).view(np.int32).astype(np.int64)
        return total

    def _bytes(self, address: int, nbytes: int, shared: bool) -> Any:
        if not shared:
            return self._memory.view(address, nbytes)
        assert 0 <= address <= len(self._shared) - nbytes
        return self._shared[address : address + nbytes]

    def _load(self, w: Warp, on: Lanes, one: Instruction, shared: bool) -> None:
        operands = [o for o in one.operands if o.kind != "P"]
        target, source = operands[0], operands[1]
        address, words = self._address(w, source, shared), _words(one)
        for lane in np.flatnonzero(on):
            found = self._bytes(int(address[lane]), 4 * words, shared).view(np.uint32)
            for i in range(words):
                if target.number != 255:
                    w.r[target.number + i, lane] = found[i]

    def _store(self, w: Warp, on: Lanes, one: Instruction, shared: bool) -> None:
        target, source = one.operands[:2]
        address, words = self._address(w, target, shared), _words(one)
        values = [self._raw(w, source._replace(number=min(source.number + i, 255))) for i in range(words)]
        for lane in np.flatnonzero(on):
            place = self._bytes(int(address[lane]), 4 * words, shared).view(np.uint32)
            place[:] = [value[lane] for value in values]

    def _ldg(self, w: Warp, on: Lanes, one: Instruction) -> None:
        self._load(w, on, one, shared=False)

    def _stg(self, w: Warp, on: Lanes, one: Instruction) -> None:
        self._store(w, on, one, shared=False)

    def _lds(self, w: Warp, on: Lanes, one: Instruction) -> None:
        self._load(w, on, one, shared=True)

    def _sts(self, w: Warp, on: Lanes, one: Instruction) -> None:
        self._store(w, on, one, shared=True)

    _ld, _st = _ldg, _stg

    def _ldgsts(self, w: Warp, on: Lanes, one: Instruction) -> None:
        """Copy from global to shared memory, synchronously."""
        target, source = (
            self._address(w, o, shared) for o, shared in zip(one.operands[:2], (True, False), strict=True)
        )
        for lane in np.flatnonzero(on):
            found = self._bytes(int(source[lane]), 4 * _words(one), shared=False)
            self._bytes(int(target[lane]), 4 * _words(one), shared=True)[:] = found

    def _atomic(self, w: Warp, on: Lanes, one: Instruction, shared: bool) -> None:
        operands = list(one.operands)
        if operands[0].kind == "P":
            operands.pop(0)
        target = operands.pop(0) if operands[0].kind == "R" else None
        address = self._address(w, operands[0], shared)
        values = [self._int(w, o) for o in operands[1:]]
        for lane in np.flatnonzero(on):
            place = self._bytes(int(address[lane]), 4, shared).view(np.uint32)
            old = int(place[0])
            place[0] = _changed(one, old, [int(value[lane]) for value in values])
            if target is not None and target.number != 255:
                w.r[target.number, lane] = old

    def _atoms(self, w: Warp, on: Lanes, one: Instruction) -> None:
        self._atomic(w, on, one, shared=True)

    def _atomg(self, w: Warp, on: Lanes, one: Instruction) -> None:
        self._atomic(w, on, one, shared=False)

    _atom = _red = _redg = _atomg


def _words(one: Instruction) -> int:
    return 4 if "128" in one.modifiers else 2 if "64" in one.modifiers else 1


def _table3(table: int, a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """Look up three bits in a truth table."""
    value = np.zeros(WARP, np.uint32)
    for row in range(8):
        if table >> row & 1:
            value |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return value


def _changed(one: Instruction, old: int, values: list[int]) -> int:
    kinds, value = one.modifiers, values[0] if values else 0
    if "CAS" in kinds or "CAST" in kinds:
        return values[1] if old == value else old
    if "POPC" in kinds:
        return old + 1 & 0xFFFFFFFF
    if "INC" in kinds:
        return 0 if old >= value else old + 1
    if "ADD" in kinds:
        return old + value & 0xFFFFFFFF
    if "EXCH" in kinds:
        return value
    if "MIN" in kinds:
        return min(old, value)
    if "MAX" in kinds:
        return max(old, value)
    if "OR" in kinds:
        return old | value
    raise NotImplementedError(one.line)
