"""Where a model server publishes its KV events: apart from their reader, which who only names them does not need."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EventEndpoints:
    """ZeroMQ endpoints of one server: where it publishes, and where it repeats what was missed ("": nowhere)."""

    events: str
    replay: str = ""
