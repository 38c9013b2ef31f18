"""`trinity workers`: add, drain and flip workers of a running node, individually or by GPU."""

from typing import Annotated

import typer

from launchers.node_option import NodeOption
from runtime.errors import UsageError
from runtime.node.run_dir import find_node
from runtime.node.supervisor.admin import scale_workers
from runtime.node.supervisor.scaling import GPU_NAMES, ScaleAction

workers_app = typer.Typer(help="Add, drain or flip workers of a running node.", no_args_is_help=True)

Role = Annotated[str, typer.Argument(help="Role: prefill or decode.")]
AnyRole = Annotated[str, typer.Argument(help="Role: prefill, decode, pool, or engine (an instance of vLLM).")]
Name = Annotated[str, typer.Option(help="Worker, such as decode-1; default: the last one of the role.")]
Gpu = Annotated[str, typer.Option(help='Select all workers of this GPU ("cuda:3" or its UUID) instead of a role.')]
Timeout = Annotated[float, typer.Option(help="Seconds to wait for completion.")]


@workers_app.command()
def add(role: AnyRole = "", gpu: Gpu = "", node: NodeOption = "", timeout: Timeout = 600.0) -> None:
    """Add a worker of a role, or the drained workers of a GPU; return when they are ready.

    Drained workers of the node's plan are restored first; beyond the plan neither pool workers nor vLLM instances can
    be added.
    """
    _change(node, "add", _target(role, "", gpu), timeout, "{} is ready")


@workers_app.command()
def drain(role: AnyRole = "", name: Name = "", gpu: Gpu = "", node: NodeOption = "", timeout: Timeout = 1800.0) -> None:
    """Drain a worker, or all workers of a GPU, and remove them; return when they have exited."""
    _change(node, "drain", _target(role, name, gpu), timeout, "{} has left")


@workers_app.command()
def flip(role: Role, name: Name = "", node: NodeOption = "", timeout: Timeout = 1800.0) -> None:
    """Replace a worker by one of the other role: start the new one, then drain the old one."""
    _change(node, "flip", _target(role, name, ""), timeout, "{} is ready in its place")


def _target(role: str, name: str, gpu: str) -> str:
    if bool(gpu) == bool(role or name):
        raise UsageError("give either a role (or a worker's --name) or --gpu")
    if gpu and not gpu.startswith(GPU_NAMES):
        raise UsageError(f'--gpu {gpu!r} is not a GPU: give "cuda:N" or a UUID')
    if role and name and not name.startswith(f"{role}-"):
        raise UsageError(f"--name {name!r} is not a {role} worker")
    return gpu or name or role


def _change(node: str, verb: ScaleAction, target: str, timeout_s: float, done: str) -> None:
    for worker in scale_workers(find_node(node), verb, target, timeout_s):
        print(done.format(worker))
