"""`trinity logs`: the logs of all processes of a node, merged by time."""

import os
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from runtime.errors import InvalidRequest, Unavailable
from runtime.node.config import NodeSection
from runtime.node.logs.log import LEVELS, Level, LogLine, escape_control
from runtime.node.logs.reader import read_logs
from runtime.node.placement.plan import default_run_dir
from runtime.node.run_dir import LOGS, find_node


def logs(
    node: Annotated[
        str,
        typer.Argument(
            help="Name or run directory of the node, or a directory of logs.", show_default="the only running node"
        ),
    ] = "",
    worker: Annotated[str, typer.Option(help='Show only this process, such as "decode-0" or "supervisor".')] = "",
    request: Annotated[str, typer.Option(help="Show only this request (its x-request-id).")] = "",
    level: Annotated[Level, typer.Option(help="Minimum level.")] = "debug",
) -> None:
    """Print the logs of a node's processes, merged by time. `trinity serve` writes the same lines as they come."""
    directory = _log_directory(node)
    processes = sorted(path.name.removesuffix(".log") for path in directory.glob("*.log"))
    if worker and worker not in processes:
        raise InvalidRequest(f"--worker {worker}: {directory} has logs of {', '.join(processes) or 'no process'}")
    try:
        for line in read_logs(directory):
            if _matches(line, worker, request, level):
                print(format_line(line))
        sys.stdout.flush()
    except BrokenPipeError:  # such as `trinity logs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def format_line(line: LogLine) -> str:
    """Format a line for display, with its traceback on separate lines."""
    head = msgspec.structs.replace(line, detail="").text()
    return "\n    ".join([head, *map(escape_control, line.detail.splitlines())])


def _matches(line: LogLine, worker: str, request: str, level: Level) -> bool:
    of_request = not request or line.request == request or line.request.startswith(f"{request}~")  # a later attempt
    return of_request and line.process == (worker or line.process) and LEVELS.get(line.level, 99) >= LEVELS[level]


def _log_directory(node: str) -> Path:
    """Return the directory of the node's logs; those of a dead node remain readable."""
    try:
        return Path(find_node(node).logs)
    except Unavailable:
        named = Path(node) if "/" in node else default_run_dir(node or NodeSection().name)
        for directory in (named, named / LOGS):
            if any(directory.glob("*.log")):
                return directory
        raise
