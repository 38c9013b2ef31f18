"""One request's way through a prefill worker."""

from dataclasses import dataclass, field

from runtime.serving.kv.blocks import BlockTable
from runtime.serving.kv.tiers import Load
from runtime.serving.messages import Decode, Prefill, Reserve


@dataclass(eq=False)
class Job:
    """What a prefill worker knows of a request. The KV of `done` of its `tokens` is in the blocks of `table`.

    `passages` are the ids of those in the prompt. `ticket`, `announcement` and `offer` are what it waits for: the
    pool's answer, decode's room (then it `has_room`), decode's word that the KV is pulled. The blocks are held under
    `lease`; a prompt that decode computes has neither. What KV tiers have of it is loaded first (`load`).
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
    load: Load | None = None
    done: int = 0
    offer: int | None = None

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def deadline_ns(self) -> int:
        return self.request.generation.deadline_ns

    @property
    def salt(self) -> bytes:
        return self.request.generation.salt

    @property
    def told_token(self) -> int | None:
        """The answer's next token, if its consumer has it already."""
        return self.request.resume.last_token if self.request.resume else None

    def for_room(self) -> Reserve:
        """The message that asks decode to keep room before the prompt is run."""
        return Reserve(self.id, self.request.frontend_epoch, tuple(self.tokens), self.deadline_ns, self.salt)

    def for_decode(self, model: bytes, first_token: int | None) -> Decode:
        """The message of its offer: with the KV in `table`, or without any. `model` is the identity of the model."""
        request, asked, resume = self.request, self.request.generation, self.request.resume
        return Decode(
            request_id=self.id,
            frontend_epoch=request.frontend_epoch,
            sampling=asked.sampling,
            tokens=tuple(self.tokens),
            first_token=first_token,
            retrieval=asked.retrieval,
            seen_passages=self.passages,
            stages=self.stages,
            blocks=tuple(self.table.blocks),
            model=model,
            prompt_tokens=resume.prompt_tokens if resume else len(self.tokens),
            generated=resume.generated if resume else (),
            first_is_told=self.told_token is not None,
            build=self.build,
            salt=self.salt,
        )
