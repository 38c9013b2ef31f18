"""Search parameters of a query."""

from dataclasses import dataclass

from gpu.errors import InvalidParams

MAX_TOP_M = 4096
MAX_SEARCH_WIDTH = 32


@dataclass(frozen=True, slots=True)
class SearchParams:
    """Search parameters of one query.

    k: number of results, 1..top_m.
    top_m: length of the candidate list, up to 4096. Larger values give higher recall and take longer.
    search_width: parents expanded in each extend, 1..32.
    patience: stop after this many consecutive extends that left top_m unchanged; None: search until every entry of
        top_m has been expanded (CAGRA's rule).

    Raises InvalidParams.
    """

    k: int = 10
    top_m: int = 64
    search_width: int = 4
    patience: int | None = None

    def __post_init__(self) -> None:
        _check("top_m", self.top_m, MAX_TOP_M)
        _check("search_width", self.search_width, MAX_SEARCH_WIDTH)
        _check("k", self.k, self.top_m, "top_m")
        if self.patience is not None:
            _check("patience", self.patience, 1 << 30)


def _check(name: str, value: object, limit: int, limit_name: str = "its limit") -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidParams(f"{name} must be an integer, not {value!r}")
    if not 1 <= value <= limit:
        raise InvalidParams(f"{name} is {value}, outside 1..{limit} ({limit_name})")
