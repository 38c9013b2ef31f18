"""`trinity logs`: what the processes of a node say, together and in order."""

import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from launchers.node_option import NodeOption, meant
from runtime.errors import InvalidRequest, Unavailable
from runtime.node.config import NodeSection
from runtime.node.logs.log import LEVELS, Level, Line, plain
from runtime.node.logs.reader import read
from runtime.node.placement.plan import default_run_dir
from runtime.node.run_dir import LOGS, NodeInfo, find_node

_POLL_S = 0.2


def logs(
    node: Annotated[
        str,
        typer.Argument(
            help="The node's name, its run directory, or a directory of logs.", show_default="the only one that runs"
        ),
    ] = "",
    named: NodeOption = "",
    follow: Annotated[bool, typer.Option(help="Go on with what comes, until the node ends.")] = False,
    worker: Annotated[str, typer.Option(help='Of this process alone, such as "decode-0" or "supervisor".')] = "",
    request: Annotated[str, typer.Option(help="About this request alone (the answer's x-request-id).")] = "",
    level: Annotated[Level, typer.Option(help="Of this level and what is worse.")] = "debug",
) -> None:
    """Print a node's logs in the order of time."""
    directory, info = _place(meant(node, named))
    processes = sorted(path.name.removesuffix(".log") for path in directory.glob("*.log"))
    if worker and worker not in processes:
        raise InvalidRequest(f"--worker {worker}: {directory} has logs of {', '.join(processes) or 'nobody'}")
    if follow and info is None:
        raise Unavailable(f"--follow: no node runs in {directory}")
    with _waiting_for_end_of(info if follow else None) as wait:
        try:
            for line in read(directory, wait):
                if _wanted(line, worker, request, level):
                    print(shown(line), flush=follow)
            sys.stdout.flush()
        except BrokenPipeError:  # `trinity logs | head` has read enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def shown(line: Line) -> str:
    """A line for people: a traceback on lines of its own below it."""
    head = msgspec.structs.replace(line, detail="").text()
    return "\n    ".join([head, *map(plain, line.detail.splitlines())])


def _wanted(line: Line, worker: str, request: str, level: Level) -> bool:
    of_request = not request or line.request == request or line.request.startswith(f"{request}~")  # a later attempt
    return of_request and line.process == (worker or line.process) and LEVELS.get(line.level, 99) >= LEVELS[level]


def _place(node: str) -> tuple[Path, NodeInfo | None]:
    """The directory of the node's logs, and the node if it runs: what a dead one has left can be read too."""
    try:
        info = find_node(node)
    except Unavailable:
        named = Path(node) if "/" in node else default_run_dir(node or NodeSection().name)
        for directory in (named, named / LOGS):
            if any(directory.glob("*.log")):
                return directory, None
        raise
    return Path(info.logs), info


@contextmanager
def _waiting_for_end_of(info: NodeInfo | None) -> Iterator[Callable[[], bool] | None]:
    """A wait until there may be more lines to read: False once the node has ended. None without a node."""
    if info is None:
        yield None
        return
    try:
        pidfd = os.pidfd_open(info.pid)
    except ProcessLookupError:
        yield None
        return
    try:
        yield lambda: not select.select([pidfd], [], [], _POLL_S)[0]
    finally:
        os.close(pidfd)
