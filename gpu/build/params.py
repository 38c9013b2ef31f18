"""Build parameters and their validation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from gpu.errors import InvalidParams
from gpu.index.data import MAX_CODE_BITS
from gpu.index.rows import DTYPES, METRICS
from gpu.index.storage import MAX_DEGREE

BuildDevice = Literal["cpu", "cuda"]
Progress = Callable[[str, float], None]
"""A callback that takes a stage's name and the fraction of the stage that is done, 0..1."""
MIN_DEGREE = 2
MAX_SEED = (1 << 63) - 1
MAX_THREADS = 1024


def no_progress(stage: str, done: float) -> None:
    """A `Progress` that ignores its calls."""


@dataclass(frozen=True, slots=True)
class BuildParams:
    """Build parameters of an index; see `GraphIndex.build`. Validated before a vector is read.

    Raises InvalidParams.
    """

    metric: str = "cosine"
    degree: int = 32
    dtype: str = "float32"
    code_bits: int = 0
    seed: int = 0
    threads: int = 1
    device: str = "cpu"

    def __post_init__(self) -> None:
        check_one_of("metric", self.metric, METRICS)
        check_one_of("dtype", self.dtype, DTYPES)
        check_one_of("device", self.device, get_args(BuildDevice))
        check_within("degree", self.degree, MIN_DEGREE, MAX_DEGREE)
        check_within("code_bits", self.code_bits, 0, MAX_CODE_BITS)
        check_within("seed", self.seed, 0, MAX_SEED)
        check_within("threads", self.threads, 1, MAX_THREADS)


def check_one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    """Raise InvalidParams for a value that is not in `known`."""
    if value not in known:
        raise InvalidParams(f"{name} {value!r} is none of {', '.join(known)}")


def check_within(name: str, value: object, least: int, most: int) -> None:
    """Raise InvalidParams unless the value is an integer (Python's or numpy's) within least..most."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise InvalidParams(f"{name} must be an integer, not {value!r}")
    if not least <= value <= most:
        raise InvalidParams(f"{name} is {value}, outside {least}..{most}")
