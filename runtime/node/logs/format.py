"""What a line of a log is: one event, as JSON (in files, and where programs read) or as text (where people do)."""

import logging
import re
from datetime import UTC, datetime
from typing import Literal

import msgspec

Level = Literal["debug", "info", "warning", "error"]
LEVELS: dict[str, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_MAX_EVENT = 8_192  # characters; of what is longer the end is cut off
_MAX_DETAIL = 32_768
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One event. `time` is UTC, ISO 8601, to the microsecond; `request` the id that clients see in `x-request-id`.

    `source` is the part of the process that speaks, if it is not the process's loop itself. `detail` is a traceback or
    a stack, of several lines.
    """

    time: str
    level: str
    process: str
    pid: int
    event: str
    request: str = ""
    source: str = ""
    detail: str = ""

    def text(self) -> str:
        """As one line of text: what could end a line, or move a terminal's cursor, is shown as an escape."""
        source = f" {self.source}" if self.source else ""
        request = f" [{plain(self.request)}]" if self.request else ""
        detail = f" | {plain(self.detail)}" if self.detail else ""
        return f"{self.time} {self.level[:1].upper()} {self.process}{source}{request}: {plain(self.event)}{detail}"


def plain(text: str) -> str:
    """Text that stays on its line, whatever is in it."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class Formatter(logging.Formatter):
    """A record as a `Line`. The request's id comes with the record: `log.info(..., extra={"request": id})`."""

    def __init__(self, kind: Literal["text", "json"], process: str) -> None:
        super().__init__()
        self._text = kind == "text"
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        detail = getattr(record, "detail", "")
        if record.exc_info:
            detail = self.formatException(record.exc_info)
        line = Line(
            time=datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
            level=record.levelname.lower(),
            process=self._process,
            pid=record.process or 0,
            event=_valid(record.getMessage()[:_MAX_EVENT]),
            request=_valid(str(getattr(record, "request", ""))),
            source="" if record.name in (self._process, "root") else record.name.rpartition(".")[2],
            detail=_valid(detail[-_MAX_DETAIL:]),
        )
        return line.text() if self._text else _json(line)


def _valid(text: str) -> str:
    """Without lone surrogates, which no UTF-8 has; a file name may."""
    return text.encode(errors="backslashreplace").decode()


def _json(line: Line) -> str:
    return msgspec.json.encode(line).decode()


_decode = msgspec.json.Decoder(Line).decode


def parse(line: bytes) -> Line | None:
    """A line of a log file; None for what is none, such as the half of one."""
    try:
        return _decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
