"""C functions, passed by address to compiled code, that call the methods of a test's driver."""

import ctypes
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

from gpu.cuda.driver import NOT_READY, Argument, Dim, EntryPoints
from gpu.cuda.layout import BATCH

_RAISED = 999


class LaunchDriver(Protocol):
    """The methods of a driver that compiled code calls."""

    def replay(self, stream: int, graph: int) -> None: ...

    def launch(
        self, stream: int, kernel: int, grid: Dim, block: Dim, arguments: Sequence[Argument], shared_bytes: int = 0
    ) -> None: ...

    def idle(self, stream: int) -> bool: ...


class DriverCallbacks:
    """`points` are the functions' addresses; `raise_for` raises the exception that one of them caught."""

    def __init__(self, driver: LaunchDriver) -> None:
        self._driver = driver
        self._error: BaseException = AssertionError("nothing was raised")
        word, number = ctypes.c_uint64, ctypes.c_uint32
        types = ((word,) * 2, (word, *[number] * 7, word, word, word), (word,))
        methods: tuple[Callable[..., int], ...] = (self._replay, self._launch, self._query)
        self._functions = [
            ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(self._guarded(method))
            for arguments, method in zip(types, methods, strict=True)
        ]
        self.points = EntryPoints(*[ctypes.cast(one, ctypes.c_void_p).value or 0 for one in self._functions])

    def raise_for(self) -> NoReturn:
        raise self._error

    def _guarded(self, method: Callable[..., int]) -> Callable[..., int]:
        def called(*arguments: int) -> int:
            try:
                return method(*arguments)
            except BaseException as error:
                self._error = error
                return _RAISED

        return called

    def _replay(self, graph: int, stream: int) -> int:
        self._driver.replay(stream, graph)
        return 0

    def _launch(self, kernel: int, *numbers: int) -> int:
        """Launch `write_slots`, the only kernel that compiled code launches: a BATCH and the address of commands."""
        *sizes, shared_bytes, stream, pointers, _ = numbers
        batch, commands = (ctypes.c_uint64 * 2).from_address(pointers)
        arguments = ((ctypes.c_uint8 * BATCH.itemsize).from_address(batch), ctypes.c_uint64.from_address(commands))
        self._driver.launch(stream, kernel, Dim(*sizes[:3]), Dim(*sizes[3:]), arguments, shared_bytes)
        return 0

    def _query(self, stream: int) -> int:
        return 0 if self._driver.idle(stream) else NOT_READY
