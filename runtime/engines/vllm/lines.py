"""What vLLM says, a line at a time, as our log lines; and what of it says why it ended."""

import logging
import re
from dataclasses import dataclass

_LINE = re.compile(
    r"(?:\([^)]*\) )?(DEBUG|INFO|WARNING|ERROR|CRITICAL)(?: [\d-]+ [\d:]+)?:? *(?:\[[^\]]*\] ?)?(.*)", re.DOTALL
)
_FAULT = re.compile(r"(?:^|\s)(?:[\w.]+\.)?(\w*(?:Error|Exception): .*)")
_ELSEWHERE = "Engine core initialization failed"  # it says no more than that the line before has the reason


@dataclass(slots=True)
class Lines:
    """`fault` is the last error that was named."""

    log: logging.Logger
    fault: str = ""

    def take(self, line: str) -> None:
        """One line, at the level that it names."""
        line = line.rstrip()
        if not line:
            return
        if (found := _FAULT.search(line)) and _ELSEWHERE not in line:
            self.fault = found[1][:500]
        parts = _LINE.fullmatch(line)
        level, text = (parts[1], parts[2]) if parts else ("INFO", line)
        self.log.log(logging.getLevelNamesMapping()[level], "%s", text)
