"""What `trinity doctor` says."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One line of the report; `advice` says what to do, "" when all is well."""

    level: Level
    what: str
    text: str
    advice: str = ""

    @classmethod
    def of(cls, well: bool, what: str, text: str, advice: str, otherwise: Level = "warning") -> "Finding":
        """What is well, or else at this level, with what to do."""
        return cls("ok", what, text) if well else cls(otherwise, what, text, advice)
