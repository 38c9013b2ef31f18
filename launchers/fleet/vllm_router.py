"""Command line of vllm-router 0.1 (`pip install vllm-router`) in front of nodes."""

import shlex
from collections.abc import Sequence

from launchers.fleet.haproxy import Sticky
from launchers.fleet.nodes import Address

# cache_aware keeps a tree of prompts by node, which is affinity by prefix. consistent_hash uses x-session-id.
_POLICIES = {"none": "power_of_two", "conversation": "consistent_hash", "prefix": "cache_aware"}
_SINGLE_NODE = "round_robin"  # power_of_two needs two nodes


def vllm_router(nodes: Sequence[Address], listen: Address, sticky: Sticky) -> str:
    """Return the command as one shell line."""
    options: dict[str, Sequence[object]] = {
        "--host": [listen.host],
        "--port": [listen.port],
        "--worker-urls": [node.url for node in nodes],
        "--policy": [_POLICIES[sticky] if len(nodes) > 1 else _SINGLE_NODE],
        "--health-check-interval-secs": [1],  # the default of a minute exceeds a node's drain notice
        "--health-check-timeout-secs": [2],
        "--health-failure-threshold": [2],
        "--worker-startup-check-interval": [1],
        "--request-timeout-secs": [3600],
        "--log-level": ["warning"],
    }
    words = ["vllm-router", *(str(word) for name, values in options.items() for word in (name, *values))]
    return shlex.join(words) + "\n"
