"""Writes that wait for their record of the log: several share one, and its sync."""

from collections.abc import Callable
from dataclasses import dataclass, field

from runtime.errors import TrinityError
from runtime.retrieval.attributes.schema import Schema
from runtime.retrieval.live.operations import Operation


@dataclass
class Group:
    """Operations that become one record: what has been decided in it so far."""

    next_row: int
    schema: Schema
    operations: list[Operation] = field(default_factory=list)
    rows: dict[str, int | None] = field(default_factory=dict)  # of ids: None where it deletes them
    size: int = 0


@dataclass
class Pending:
    """A write that waits for its record."""

    decide: Callable[[Group], int]
    alone: bool  # decided by what is stored: nothing may stand before it in a record
    result: int = 0
    error: TrinityError | None = None
    done: bool = False
