"""`trinity fleet`: prints configurations of load balancers in front of several nodes."""

from typing import Annotated

import typer

from launchers.fleet import envoy as for_envoy
from launchers.fleet import haproxy as for_haproxy
from launchers.fleet import vllm_router as for_vllm_router
from launchers.fleet.haproxy import Sticky
from launchers.fleet.nodes import CONVERSATION, listen_address, node_addresses

fleet_app = typer.Typer(help="Print load balancer configurations for several nodes.", no_args_is_help=True)

Nodes = Annotated[list[str], typer.Option("--node", help="URL of a node, such as http://10.0.0.1:8080 (repeatable).")]
Listen = Annotated[str, typer.Option(help="Listen address of the load balancer.")]
Stick = Annotated[
    Sticky,
    typer.Option(help=f"Session affinity: by conversation (header {CONVERSATION}) or by prompt prefix."),
]
_LISTEN = "127.0.0.1:9000"


@fleet_app.command()
def haproxy(node: Nodes, listen: Listen = _LISTEN, sticky: Stick = "none") -> None:
    """Print a HAProxy configuration (2.6 or later)."""
    nodes = node_addresses(node)
    print(for_haproxy.haproxy(nodes, listen_address(listen, nodes), sticky), end="")


@fleet_app.command()
def envoy(node: Nodes, listen: Listen = _LISTEN, sticky: Stick = "none") -> None:
    """Print an Envoy configuration."""
    nodes = node_addresses(node)
    print(for_envoy.envoy(nodes, listen_address(listen, nodes), sticky), end="")


@fleet_app.command("vllm-router")
def vllm_router(node: Nodes, listen: Listen = _LISTEN, sticky: Stick = "none") -> None:
    """Print a command that starts vllm-router. Its conversation affinity uses the header x-session-id."""
    nodes = node_addresses(node)
    print(for_vllm_router.vllm_router(nodes, listen_address(listen, nodes), sticky), end="")
