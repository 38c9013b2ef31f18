"""Bitmaps of an index's nodes: a bit each, in whole words, as compiled code reads them."""

import numpy as np
import numpy.typing as npt

from gpu.errors import InvalidParams

_WORD = 64


def bitmap(allowed: npt.NDArray[np.bool_], size: int) -> npt.NDArray[np.uint64]:
    """The bitmap uint64 of bool [size]. Raises InvalidParams for another shape or type."""
    if allowed.shape != (size,) or allowed.dtype != bool:
        raise InvalidParams(f"allowed has dtype {allowed.dtype} and shape {allowed.shape}; bool [{size}] is needed")
    packed = np.zeros(-(-size // _WORD) * _WORD // 8, np.uint8)
    packed[: -(-size // 8)] = np.packbits(allowed, bitorder="little")
    return packed.view(np.uint64)


def check_bitmap(bits: npt.NDArray[np.uint64], size: int) -> None:
    """Raise InvalidParams for what is not a bitmap of `size` nodes: compiled code would read behind its end."""
    words = -(-size // _WORD)
    if bits.shape != (words,) or bits.dtype != np.uint64 or not bits.flags.c_contiguous:
        raise InvalidParams(f"allowed has dtype {bits.dtype} and shape {bits.shape}; uint64 [{words}] is needed")
