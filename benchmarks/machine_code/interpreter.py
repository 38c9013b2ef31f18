"""Interpreter of sm_90 machine code as listed by nvdisasm, to count executed instructions on a CPU, warp by warp.

It supports the instructions that the kernels use; others raise NotImplementedError with their line. Divergent lanes of
a warp are executed lowest address first, and reconverge at BSSY/BSYNC. Its correctness is checked by the kernels'
results.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.machine_code.listing import Instruction, Kernel, Operand

Lanes = npt.NDArray[Any]

WARP = 32
MASK32 = np.uint64(0xFFFFFFFF)
COMPARE: dict[str, Callable[[Lanes, Lanes], Lanes]] = {
    "LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal, "EQ": np.equal, "NE": np.not_equal,
}  # fmt: skip


class Memory:
    """Device memory as one block; addresses start at BASE."""

    BASE = 1 << 32

    def __init__(self, nbytes: int) -> None:
        self.bytes = np.zeros(nbytes, np.uint8)
        self._used = 256

    def allocate(self, nbytes: int) -> int:
        place = self._used
        self._used += -(-nbytes // 256) * 256
        assert self._used <= len(self.bytes), "the interpreter's memory is full"
        return self.BASE + place

    def view(self, address: int, nbytes: int) -> npt.NDArray[np.uint8]:
        begin = address - self.BASE
        assert 0 <= begin <= self._used - nbytes, f"address {address:#x} is not allocated"
        return self.bytes[begin : begin + nbytes]


class LaunchCounts(NamedTuple):
    """Counts of a launch: instructions by opcode over all warps, and block barriers."""

    opcodes: Counter[str]
    barriers: int


class Warp:
    def __init__(self, number: int, threads: int, pc: int = 0) -> None:
        self.r = np.zeros((256, WARP), np.uint32)
        self.p = np.zeros((8, WARP), bool)
        self.p[7] = True
        self.ur = np.zeros(64, np.uint64)
        self.up = np.zeros(8, bool)
        self.up[7] = True
        self.pc = np.full(WARP, pc)
        self.here = np.arange(number * WARP, number * WARP + WARP) < threads  # lanes that have not exited
        self.waits = np.full(WARP, -1)  # the convergence barrier at which a lane waits
        self.meet = np.zeros((32, WARP), bool)
        self.tid = np.arange(number * WARP, number * WARP + WARP, dtype=np.uint32)
        self.at_barrier: int | None = None  # its operand of a barrier reduction
        self.answer = 0


class Interpreter:
    """Executes kernels block by block."""

    def __init__(self, kernels: dict[str, Kernel], memory: Memory, parameters_at: int) -> None:
        """parameters_at: offset of a kernel's arguments in the constant bank."""
        self._kernels, self._memory, self._parameters_at = kernels, memory, parameters_at

    def launch(self, name: str, blocks: int, threads: int, parameters: bytes, shared_bytes: int) -> LaunchCounts:
        """Execute a kernel."""
        self._kernel = self._kernels[name]
        bank = np.zeros(4096, np.uint8)
        bank[self._parameters_at : self._parameters_at + len(parameters)] = np.frombuffer(parameters, np.uint8)
        head = np.array([threads, 1, 1, blocks, 1, 1], np.uint32)
        bank[:24] = head.view(np.uint8)
        self._bank = bank.view(np.uint32)
        self._opcodes: Counter[str] = Counter()
        self._barriers = 0
        for block in range(blocks):
            self._shared = np.full(shared_bytes + 1024, 0xA5, np.uint8)
            self._block, self._threads = block, threads
            with np.errstate(over="ignore", invalid="ignore"):  # inactive lanes hold arbitrary values
                self._run([Warp(number, threads) for number in range(-(-threads // WARP))])
        return LaunchCounts(self._opcodes, self._barriers)

    def _run(self, warps: list[Warp]) -> None:
        while any(warp.here.any() for warp in warps):
            for warp in warps:
                while warp.at_barrier is None and warp.here.any():
                    self._step(warp)
            waiting = [warp for warp in warps if warp.here.any()]
            assert all(warp.at_barrier is not None for warp in waiting)
            if waiting:
                together = 0
                for warp in waiting:
                    together |= warp.at_barrier or 0
                self._barriers += 1
                for warp in waiting:
                    warp.at_barrier, warp.answer = None, together

    def _step(self, w: Warp) -> None:
        ready = w.here & (w.waits < 0)
        assert ready.any(), "deadlock: all lanes wait at convergence barriers"
        pc = int(w.pc[ready].min())
        lanes = ready & (w.pc == pc)
        one = self._kernel.code[pc]
        w.pc[lanes] = pc + 1
        self._opcodes[one.name] += 1
        on = lanes if one.guard is None else lanes & self._pred(w, one.guard)
        act = getattr(self, f"_{one.name.lower()}", None)
        if act is None:
            raise NotImplementedError(one.line)
        try:
            act(w, on, one)
        except (AssertionError, IndexError, ValueError, KeyError, TypeError) as error:
            raise NotImplementedError(f"{one.line}: {error!r}") from error

    # ---- operands

    def _pred(self, w: Warp, o: Operand) -> Lanes:
        values: Lanes = np.full(WARP, w.up[o.number]) if o.kind == "UP" else w.p[o.number]
        return ~values if o.inverted else values

    def _raw(self, w: Warp, o: Operand) -> Lanes:
        if o.kind == "R":
            return np.zeros(WARP, np.uint32) if o.number == 255 else w.r[o.number]
        if o.kind == "UR":
            return np.full(WARP, 0 if o.number == 63 else w.ur[o.number], np.uint32)
        if o.kind == "c":
            at = o.number + self._raw(w, o.parts[0]) if o.parts else np.full(WARP, o.number)
            found: Lanes = self._bank[at // 4]
            return found
        assert o.kind == "#", o
        return np.full(WARP, o.number & 0xFFFFFFFF, np.uint32)

    def _int(self, w: Warp, o: Operand) -> Lanes:
        value = self._raw(w, o)
        if o.negated:
            value = np.uint32(0) - value
        return ~value if o.inverted else value

    def _float(self, w: Warp, o: Operand) -> Lanes:
        value = o.parts[0].repeat(WARP) if o.kind == "#" and o.parts else self._raw(w, o).view(np.float32)
        value = np.abs(value) if o.absolute else value
        return -value if o.negated else value

    def _wide(self, w: Warp, o: Operand) -> Lanes:
        """Return 64 bits: a register and the next."""
        if o.kind == "#":
            return np.full(WARP, o.number, np.uint64)
        low = self._raw(w, o).astype(np.uint64)
        if (o.kind, o.number) in (("R", 255), ("UR", 63)):
            return low
        return low | self._raw(w, o._replace(number=o.number + (4 if o.kind == "c" else 1))).astype(
            np.uint64
        ) << np.uint64(32)

    def _put(self, w: Warp, on: Lanes, o: Operand, value: Lanes) -> None:
        if o.kind == "UR":
            if o.number != 63 and on.any():
                w.ur[o.number] = np.asarray(value).astype(np.uint32)[int(np.flatnonzero(on)[0])]
        elif o.number != 255:
            w.r[o.number][on] = np.asarray(value).astype(np.uint32)[on]

    def _put_wide(self, w: Warp, on: Lanes, o: Operand, value: Lanes) -> None:
        self._put(w, on, o, value & MASK32)
        self._put(w, on, o._replace(number=min(o.number + 1, 255)), value >> np.uint64(32))

    def _put_pred(self, w: Warp, on: Lanes, o: Operand, value: Lanes) -> None:
        if o.number == 7:
            return
        if o.kind == "UP":
            if on.any():
                w.up[o.number] = bool(np.asarray(value)[int(np.flatnonzero(on)[0])])
        else:
            w.p[o.number][on] = np.asarray(value, bool)[on]

    # ---- control

    def _bra(self, w: Warp, on: Lanes, one: Instruction) -> None:
        if "DIV" in one.modifiers:  # if the lanes of the mask have diverged
            together = sum(1 << lane for lane in range(WARP) if on[lane])
            if int(self._int(w, one.operands[0])[0]) & ~together == 0:
                return
        target = self._kernel.labels[one.operands[-1].parts[0]]
        for o in one.operands[:-1]:
            if o.kind in ("P", "UP"):
                on = on & self._pred(w, o)
        w.pc[on] = target

    _call = _bra  # used only for calls that do not return

    def _exit(self, w: Warp, on: Lanes, one: Instruction) -> None:
        w.here = w.here & ~on
        for number in range(len(w.meet)):
            self._meet(w, number)

    def _bssy(self, w: Warp, on: Lanes, one: Instruction) -> None:
        number = one.operands[0].number
        w.meet[number] = on.copy()

    def _bsync(self, w: Warp, on: Lanes, one: Instruction) -> None:
        number = one.operands[0].number
        w.waits[on & w.meet[number]] = number
        self._meet(w, number)

    def _meet(self, w: Warp, number: int) -> None:
        expected = w.meet[number] & w.here
        if expected.any() and (w.waits[expected] == number).all():
            w.waits[expected] = -1
            w.meet[number] = False

    def _break(self, w: Warp, on: Lanes, one: Instruction) -> None:
        number = next(o.number for o in one.operands if o.kind == "B")
        for o in one.operands:
            if o.kind == "P":
                on = on & self._pred(w, o)
        w.meet[number] &= ~on
        self._meet(w, number)

    def _warpsync(self, w: Warp, on: Lanes, one: Instruction) -> None:
        self._together(w, on)

    def _together(self, w: Warp, on: Lanes) -> None:
        assert (on == w.here).all(), "lanes of a warp have diverged"

    def _bar(self, w: Warp, on: Lanes, one: Instruction) -> None:
        if not on.any():
            return
        self._together(w, on)
        w.at_barrier = 0
        if "RED" in one.modifiers:
            value = self._pred(w, one.operands[-1])
            w.at_barrier = int((value & on).any())

    def _b2r(self, w: Warp, on: Lanes, one: Instruction) -> None:
        """Read the reduction of the last barrier."""
        self._put_pred(w, on, one.operands[1], np.full(WARP, bool(w.answer)))

    def _nop(self, w: Warp, on: Lanes, one: Instruction) -> None: ...

    _membar = _errbar = _cctl = _yield = _depbar = _ldgdepbar = _cgaerrbar = _nop

    # ---- moves and selections

    def _mov(self, w: Warp, on: Lanes, one: Instruction) -> None:
        self._put(w, on, one.operands[0], self._int(w, one.operands[1]))

    def _hfma2(self, w: Warp, on: Lanes, one: Instruction) -> None:
        """Load a constant: the only use of HFMA2 here is 0 · 0 + two halves."""
        target, a, b, *halves = one.operands
        assert a.number == b.number == 255
        bits = [int(np.float16(half.parts[0] if half.parts else half.number).view(np.uint16)) for half in halves]
        self._put(w, on, target, np.full(WARP, bits[0] << 16 | bits[1], np.uint32))

    _umov = _mov

    def _r2ur(self, w: Warp, on: Lanes, one: Instruction) -> None:
        target, source = [o for o in one.operands if o.kind != "P" and o.kind != "UP"][:2]
        self._put(w, on, target, self._int(w, source))

    def _uldc(self, w: Warp, on: Lanes, one: Instruction) -> None:
        if "64" in one.modifiers:
            self._put_wide(w, on, one.operands[0], self._wide(w, one.operands[1]))
        else:
            self._mov(w, on, one)

    _ldc = _uldc

    def _s2r(self, w: Warp, on: Lanes, one: Instruction) -> None:
        name = one.operands[1].parts[0]
        if name == "SR_TID.X":
            value = w.tid
        elif name == "SR_CTAID.X":
            value = np.full(WARP, self._block, np.uint32)
        elif name == "SR_LANEID":
            value = np.arange(WARP, dtype=np.uint32)
        elif name == "SR_CgaCtaId":
            value = np.zeros(WARP, np.uint32)
        elif name in ("SR_LTMASK", "SR_LT_MASK"):
            value = (np.uint64(1) << np.arange(WARP, dtype=np.uint64)) - np.uint64(1)
        else:
            raise NotImplementedError(one.line)
        self._put(w, on, one.operands[0], value)

    _s2ur = _s2r

    def _cs2r(self, w: Warp, on: Lanes, one: Instruction) -> None:
        assert one.operands[1].parts[0] == "SRZ"
        target = one.operands[0]
        if "32" in one.modifiers:
            self._put(w, on, target, np.zeros(WARP, np.uint32))
        else:
            self._put_wide(w, on, target, np.zeros(WARP, np.uint64))

    def _sel(self, w: Warp, on: Lanes, one: Instruction) -> None:
        target, a, b, p = one.operands
        self._put(w, on, target, np.where(self._pred(w, p), self._int(w, a), self._int(w, b)))

    _usel = _sel

    def _fsel(self, w: Warp, on: Lanes, one: Instruction) -> None:
        target, a, b, p = one.operands
        value = np.where(self._pred(w, p), self._float(w, a), self._float(w, b)).astype(np.float32)
        self._put(w, on, target, value.view(np.uint32))

    def _p2r(self, w: Warp, on: Lanes, one: Instruction) -> None:
        target, _, source, mask = one.operands
        bits = sum(np.where(w.p[i], np.uint32(1 << i), np.uint32(0)) for i in range(7))
        keep = self._int(w, mask)
        self._put(w, on, target, (bits & keep) | (self._int(w, source) & ~keep))

    def _r2p(self, w: Warp, on: Lanes, one: Instruction) -> None:
        _, source, mask = one.operands
        value, chosen = self._int(w, source), int(self._int(w, mask)[0])
        for i in range(7):
            if chosen >> i & 1:
                w.p[i][on] = (value >> np.uint32(i) & np.uint32(1)).astype(bool)[on]

    def _prmt(self, w: Warp, on: Lanes, one: Instruction) -> None:
        target, a, selector, b = one.operands
        both = self._int(w, a).astype(np.uint64) | self._int(w, b).astype(np.uint64) << np.uint64(32)
        picks, value = self._int(w, selector).astype(np.uint64), np.zeros(WARP, np.uint64)
        for i in range(4):
            pick = picks >> np.uint64(4 * i) & np.uint64(15)
            byte = both >> (np.uint64(8) * (pick & np.uint64(7))) & np.uint64(255)
            byte = np.where(pick & np.uint64(8), np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0)), byte)
            value |= byte << np.uint64(8 * i)
        self._put(w, on, target, value)

    _uprmt = _prmt
