"""Findings of `trinity doctor`."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One line of the report. `advice`: what to do, "" if nothing is wrong."""

    level: Level
    subject: str
    text: str
    advice: str = ""

    @classmethod
    def of(cls, ok: bool, subject: str, text: str, advice: str, otherwise: Level = "warning") -> "Finding":
        """Return an "ok" finding if `ok`, else one of level `otherwise` with the advice."""
        return cls("ok", subject, text) if ok else cls(otherwise, subject, text, advice)
