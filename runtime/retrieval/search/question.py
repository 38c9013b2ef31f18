"""A query as its client keeps it until it has ended, and how long it does."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from ipc import SearchSpec
from runtime.errors import DeadlineExceeded, InternalError, InvalidRequest, Overloaded, TrinityError, WorkerLost
from runtime.retrieval.search.arguments import check_finite
from runtime.retrieval.search.results import Gather
from runtime.retrieval.vectors.vectors import Vectors, on_host

Accept = Callable[[str], bool]
"""Whether an answer from a collection's build of this identity is of use."""


class Question(msgspec.Struct, eq=False):
    """One query, or one shard's part of it (`gather` has the whole then): all that is needed to ask once more.

    `at`: how many sessions have it and have not answered; more than one if it was asked again of another pool while the
    first is silent. `identity` is that of the build that answered it. `accept`: None for any.
    """

    ticket: int
    vector: Vectors  # one on a GPU as its caller has it: it can be asked again from there
    spec: SearchSpec
    parked_ns: int = 0  # since when it waits for a pool; 0: it does not
    shard: int = 0
    attempts: int = 0
    at: int = 0
    ended: bool = False  # what comes after that is of no use
    gather: "Gather[Question] | None" = None
    accept: Accept | None = None
    identity: str = ""


def error_of(status: str, question: Question) -> TrinityError:
    """What ends a question that its pool ended with this status."""
    match status:
        case "overloaded":
            return Overloaded("the pool's queue is full")
        case "deadline_exceeded":
            return DeadlineExceeded("the pool could not answer the query before its deadline")
        case "invalid_request":
            try:
                check_finite(on_host(question.vector))
            except InvalidRequest as error:
                return error
            return InvalidRequest("the pool refused the query: a limit of its own is passed")
        case "lost" | "stale_epoch":
            return WorkerLost(f"the pool died with the query, {question.attempts} times")
        case "cancelled":
            return DeadlineExceeded("the query was cancelled")
        case _:
            return InternalError(f"the pool ended the query with status {status!r}")


@dataclass(frozen=True)
class Limits:
    """How long, and how many, a client of the pools has wait. `retry_ns`: a lost pool is tried again this often.
    `wait_ns`: a query without a deadline waits so long for one, while none of its collection is answered. `parked`: so
    many queries wait for a pool at once."""

    retry_ns: int = 500_000_000
    wait_ns: int = 10_000_000_000
    parked: int = 1024
