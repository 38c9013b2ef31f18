"""`trinity workers`: workers that come and go while the node serves, one by one or all of a GPU."""

from typing import Annotated

import typer
from rich.console import Console

from launchers.node_option import NodeOption
from launchers.status import show_status
from runtime.errors import UsageError
from runtime.node.run_dir import find_node
from runtime.node.supervisor.admin import scale_workers
from runtime.node.supervisor.scaling import GPU_NAMES, ScaleAction

workers_app = typer.Typer(help="A running node's workers: add, drain, flip.", no_args_is_help=True)

Role = Annotated[str, typer.Argument(help="prefill or decode.")]
AnyRole = Annotated[str, typer.Argument(help="prefill, decode or pool.")]
Name = Annotated[str, typer.Option(help="This worker, such as decode-1; else the role's last one.")]
Gpu = Annotated[str, typer.Option(help='Instead of a role: all workers of this GPU, "cuda:3" or its UUID.')]
Timeout = Annotated[float, typer.Option(help="Seconds to wait until it is done.")]


@workers_app.command("list", hidden=True)  # the older name of `trinity status`
def list_workers(node: NodeOption = "") -> None:
    """Show the workers. Exits with 1 if one of them is not ready."""
    raise typer.Exit(show_status(find_node(node), Console()))


@workers_app.command()
def add(role: AnyRole = "", gpu: Gpu = "", node: NodeOption = "", timeout: Timeout = 600.0) -> None:
    """Start one more worker of a role, or those that have left a GPU; returns when they take requests.

    Places of the node's own plan whose workers have left are taken again first; a pool has no others.
    """
    _change(node, "add", _meant(role, "", gpu), timeout, "{} is ready")


@workers_app.command()
def drain(role: AnyRole = "", name: Name = "", gpu: Gpu = "", node: NodeOption = "", timeout: Timeout = 1800.0) -> None:
    """Take a worker, or all of a GPU, out of the node after they have finished what they have; returns when they are
    gone."""
    _change(node, "drain", _meant(role, name, gpu), timeout, "{} has left")


@workers_app.command()
def flip(role: Role, name: Name = "", node: NodeOption = "", timeout: Timeout = 1800.0) -> None:
    """Turn a worker of this role into one of the other: a new one gets ready first, then the old one drains."""
    _change(node, "flip", _meant(role, name, ""), timeout, "{} is ready in its place")


def _meant(role: str, name: str, gpu: str) -> str:
    if bool(gpu) == bool(role or name):
        raise UsageError("say either a role (or a worker's --name) or a --gpu")
    if gpu and not gpu.startswith(GPU_NAMES):
        raise UsageError(f'--gpu is {gpu!r}, which names no GPU: "cuda:3" or a UUID does')
    if role and name and not name.startswith(f"{role}-"):
        raise UsageError(f"--name is {name!r}, which is no {role} worker")
    return gpu or name or role


def _change(node: str, verb: ScaleAction, what: str, timeout_s: float, done: str) -> None:
    for worker in scale_workers(find_node(node), verb, what, timeout_s):
        print(done.format(worker))
