"""One request's way through a prefill worker."""

from dataclasses import dataclass, field

from runtime.serving.kv.blocks import BlockTable
from runtime.serving.messages import Prefill


@dataclass(eq=False)
class Job:
    """What a prefill worker knows of a request. The KV of `done` of its `tokens` is in the blocks of `table`.

    `passages` are the ids of those in the prompt. `ticket`, `announcement` and `offer` are what it waits for: the
    pool's answer, decode's room (then it `has_room`), decode's word that the KV is pulled. The blocks are held under
    `lease`.
    """

    request: Prefill
    stages: dict[str, int]
    ticket: int | None = None
    passages: tuple[str, ...] = ()
    build: str = ""  # of the collection that they are from
    tokens: list[int] = field(default_factory=list)
    announcement: int | None = None
    has_room: bool = False
    lease: int | None = None
    table: BlockTable = field(default_factory=BlockTable)
    done: int = 0
    offer: int | None = None

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def deadline_ns(self) -> int:
        return self.request.generation.deadline_ns
