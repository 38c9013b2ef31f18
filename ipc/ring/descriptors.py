"""Layout of a session's slots: the 56 header bytes of a request and of a result, and their codes.

```
request     q id | q deadline_ns | q enqueue_ns | 24 bytes parameters | I written | 4 spare     payload: dim float32, or
            for a vector in the pool's arena (`device_arena.py`): I slot of the lease | I generation of its use, which
            the client's device stores in `written` behind the vector
parameters  I epoch | B kind | B stage | H collection | H k | H filter slot (0: none; `filters.py`) |
            I top_m | H search_width | H patience (0: none) | H dim | H flow
result      q id | I epoch | B status | 3 spare | I count | I extends | q receive_ns | q begin_ns | q end_ns | 8 spare
            payload: count int64 ids, then, from byte 8·max_k on, count float32 distances
```
A client reuses the same few specs, so it caches them validated and packed: `session/parameters.py`.
"""

import struct
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

REQUEST_HEADER = struct.Struct("<qqq24s8x")
PARAMETERS = struct.Struct("<IBBHHHIHHHH")
RESULT_HEADER = struct.Struct("<qIB3xIIqqq8x")
assert REQUEST_HEADER.size == RESULT_HEADER.size == 56
assert PARAMETERS.size == 24

SEARCH, CANCEL, SEARCH_ARENA = 0, 1, 2  # kinds of request
WRITTEN = 48
"""Byte offset of `written` in a request's header."""

Stage = Literal["prefill", "decode"]
STAGES: tuple[Stage, ...] = ("prefill", "decode")
LOST = "lost"
STATUSES = ("ok", "cancelled", "overloaded", "deadline_exceeded", "invalid_request", "stale_epoch", "failed", LOST)
"""How a request ended. 'lost' is set by the client when the session ends; 'stale_epoch' refuses a descriptor of another
epoch; the pool sets the others."""

STAGE_CODES = {name: code for code, name in enumerate(STAGES)}
STATUS_CODES = {name: code for code, name in enumerate(STATUSES)}

MAX_REQUEST_ID = (1 << 62) - 1
MAX_U16 = (1 << 16) - 1
MAX_I64 = (1 << 63) - 1

Float32s = npt.NDArray[np.float32]
Int64s = npt.NDArray[np.int64]


class SearchSpec(msgspec.Struct, frozen=True):
    """Parameters of a search besides its vector, used from the caller to the pool.

    `k` neighbours in `collection`, for a `stage`, with `top_m` (None: the client's default), `search_width`, `patience`
    (None: the index's own stopping rule) and `deadline_ns`, monotonic (0: none). `filter`: an encoded filter, opaque
    here; empty: none. `flow`: 0..65535; the server shares work fairly between the flows of its clients.
    """

    collection: str
    k: int
    stage: Stage = "prefill"
    top_m: int | None = None
    search_width: int = 1
    patience: int | None = None
    deadline_ns: int = 0
    filter: bytes = b""
    flow: int = 0


class Result(msgspec.Struct, frozen=True, eq=False):
    """How a request ended: `ids` int64 [count], `distances` float32 [count] (own copies), empty unless status is 'ok'.

    Times are monotonic ns: enqueued by the client, received by the pool, begun (0: never), ended.
    """

    request_id: int
    status: str
    ids: Int64s
    distances: Float32s
    extends: int
    enqueue_ns: int
    receive_ns: int
    begin_ns: int
    end_ns: int
