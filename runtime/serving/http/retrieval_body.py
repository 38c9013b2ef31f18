"""The body of `POST /v1/retrieval`, and the short way of most."""

import math
from contextlib import suppress
from struct import pack_into
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field

from runtime.serving.http.api_types import MAX_TOKENS, Hybrid, RerankField, filter_at
from runtime.serving.http.parsing import StrictModel, field_error, json_name, parse

FLOAT32_MAX = 3.4028234663852886e38


def _validate_vector(value: object) -> object:
    """Return the vector as float32 [d]."""
    if not isinstance(value, list):
        raise field_error(f"vector must be an array of numbers, not {json_name(value)}")
    if set(map(type, value)) <= {float, int}:
        with suppress(OverflowError):  # an integer beyond float64
            numbers = np.array(value, np.float64)
            if (np.abs(numbers) <= FLOAT32_MAX).all():  # false for NaN
                return numbers.astype(np.float32)
    for index, number in enumerate(value):
        if not isinstance(number, int | float) or isinstance(number, bool):
            raise field_error(f"vector[{index}] must be a number, not {json_name(number)}")
        if abs(number) > FLOAT32_MAX:  # before isnan: an integer may exceed any float
            raise field_error(f"vector[{index}] is beyond float32")
        if math.isnan(number):
            raise field_error(f"vector[{index}] is not a number (NaN)")
    raise AssertionError("one of the numbers is at fault")


class RetrievalBody(StrictModel):
    """POST /v1/retrieval: search by `query` (text) or `vector`, with `filter`, `hybrid` search and `rerank`."""

    collection: str | None = None
    query: str | None = Field(None, min_length=1)
    vector: Annotated[Any, BeforeValidator(_validate_vector)] = None  # float32 [d]
    k: int = Field(4, ge=1, le=MAX_TOKENS)
    filter: Annotated[Any, BeforeValidator(filter_at("filter"))] = None
    hybrid: Hybrid = 0.0
    rerank: RerankField = None


class PlainBody(msgspec.Struct, forbid_unknown_fields=True):
    """A `RetrievalBody` with none of its rarer fields, as most are."""

    query: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    vector: Any = None  # float32 [d]
    k: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)] = 4
    collection: str = ""
    filter: ClassVar[None] = None
    hybrid: ClassVar[float] = 0.0
    rerank: ClassVar[None] = None


class _Sent(PlainBody, forbid_unknown_fields=True):
    vector: list[float] | None = None


_decode = msgspec.json.Decoder(_Sent).decode


def parse_retrieval(body: bytes) -> RetrievalBody | PlainBody:
    """Parse a `RetrievalBody`: `parse` says what is wrong with it, and reads what a `PlainBody` has not."""
    try:
        parsed: PlainBody = _decode(body)
        if parsed.vector is not None:
            parsed.vector = _float32(parsed.vector)
    except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError):
        return parse(RetrievalBody, body)
    return parsed


def _float32(numbers: list[float]) -> NDArray[np.float32]:
    """Return numbers of JSON as float32, in half of numpy's time. Raises OverflowError if one may be beyond it."""
    packed = bytearray(4 * len(numbers))  # an array of bytes could not be written to
    pack_into(f"{len(numbers)}f", packed, 0, *numbers)
    vector = np.frombuffer(packed, np.float32)
    if np.maximum.reduce(np.absolute(vector), initial=0.0) >= FLOAT32_MAX:  # it may have been rounded to that
        raise OverflowError
    return vector
