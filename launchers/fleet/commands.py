"""`trinity fleet`: what stands in front of several nodes, printed ready to use."""

from typing import Annotated

import typer

from launchers.fleet import envoy as for_envoy
from launchers.fleet import haproxy as for_haproxy
from launchers.fleet import vllm_router as for_vllm_router
from launchers.fleet.haproxy import Sticky
from launchers.fleet.nodes import CONVERSATION, listen_address, node_addresses

fleet_app = typer.Typer(help="Balancers in front of several nodes: print their configuration.", no_args_is_help=True)

Nodes = Annotated[list[str], typer.Option("--node", help="A node, such as http://10.0.0.1:8080; once for each.")]
Listen = Annotated[str, typer.Option(help="Where the balancer listens.")]
Stick = Annotated[
    Sticky,
    typer.Option(help=f"Which requests go to one node: conversation (header {CONVERSATION}), prefix (of the prompt)."),
]
_LISTEN = "127.0.0.1:9000"


@fleet_app.command()
def haproxy(node: Nodes, listen: Listen = _LISTEN, sticky: Stick = "none") -> None:
    """Print a configuration of HAProxy (2.6 and later)."""
    nodes = node_addresses(node)
    print(for_haproxy.haproxy(nodes, listen_address(listen, nodes), sticky), end="")


@fleet_app.command()
def envoy(node: Nodes, listen: Listen = _LISTEN, sticky: Stick = "none") -> None:
    """Print a configuration of Envoy."""
    nodes = node_addresses(node)
    print(for_envoy.envoy(nodes, listen_address(listen, nodes), sticky), end="")


@fleet_app.command("vllm-router")
def vllm_router(node: Nodes, listen: Listen = _LISTEN, sticky: Stick = "none") -> None:
    """Print a command that starts vllm-router. (Of a conversation it goes by the header x-session-id.)"""
    nodes = node_addresses(node)
    print(for_vllm_router.vllm_router(nodes, listen_address(listen, nodes), sticky), end="")
