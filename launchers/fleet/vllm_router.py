"""The command that starts vllm-router 0.1 (`pip install vllm-router`) in front of nodes."""

import shlex
from collections.abc import Sequence

from launchers.fleet.haproxy import Sticky
from launchers.fleet.nodes import Address

# Its cache_aware keeps a tree of prompts by node: what is sticky by prefix here. consistent_hash goes by x-session-id.
_POLICIES = {"none": "power_of_two", "conversation": "consistent_hash", "prefix": "cache_aware"}
_ALONE = "round_robin"  # power_of_two wants two


def vllm_router(nodes: Sequence[Address], listen: Address, sticky: Sticky) -> str:
    """The command, in one line of a shell."""
    options: dict[str, Sequence[object]] = {
        "--host": [listen.host],
        "--port": [listen.port],
        "--worker-urls": [node.url for node in nodes],
        "--policy": [_POLICIES[sticky] if len(nodes) > 1 else _ALONE],
        "--health-check-interval-secs": [1],  # a minute is its default: longer than a node waits when it stops
        "--health-check-timeout-secs": [2],
        "--health-failure-threshold": [2],
        "--worker-startup-check-interval": [1],
        "--request-timeout-secs": [3600],
        "--log-level": ["warning"],
    }
    words = ["vllm-router", *(str(word) for name, values in options.items() for word in (name, *values))]
    return shlex.join(words) + "\n"
