"""`trinity workers`: prefill and decode workers that come and go while the node serves."""

from typing import Annotated

import typer
from rich.console import Console

from launchers.status import show_status
from runtime.node.changes import Verb
from runtime.node.control import change_worker
from runtime.node.run_dir import find_node

workers_app = typer.Typer(help="A running node's workers: list, add, drain, flip.", no_args_is_help=True)

Node = Annotated[str, typer.Option(help="The node's name, or its run directory.")]
Role = Annotated[str, typer.Argument(help="prefill or decode.")]
Name = Annotated[str, typer.Option(help="This worker, such as decode-1; else the role's last one.")]
Timeout = Annotated[float, typer.Option(help="Seconds to wait until it is done.")]


@workers_app.command("list")
def list_workers(node: Node = "trinity") -> None:
    """Show the workers. Exits with 1 if one of them is not ready."""
    raise typer.Exit(show_status(find_node(node), Console()))


@workers_app.command()
def add(role: Role, node: Node = "trinity", timeout: Timeout = 600.0) -> None:
    """Start one more worker of a role; returns when it takes requests."""
    _change(node, "add", role, timeout, "{} is ready")


@workers_app.command()
def drain(role: Role, name: Name = "", node: Node = "trinity", timeout: Timeout = 1800.0) -> None:
    """Take a worker out of the node after it has finished what it has; returns when it is gone."""
    _change(node, "drain", name or role, timeout, "{} has left")


@workers_app.command()
def flip(role: Role, name: Name = "", node: Node = "trinity", timeout: Timeout = 1800.0) -> None:
    """Turn a worker of this role into one of the other: a new one gets ready first, then the old one drains."""
    _change(node, "flip", name or role, timeout, "{} is ready in its place")


def _change(node: str, verb: Verb, what: str, timeout_s: float, done: str) -> None:
    print(done.format(change_worker(find_node(node), verb, what, timeout_s)))
