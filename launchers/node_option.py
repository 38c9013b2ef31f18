"""Node selection on the command line: by default the only running node.

Every command accepts `--node NODE`; commands without other positional arguments also accept `NODE`.
"""

from typing import Annotated

import typer

from runtime.errors import UsageError

_HELP = "Name or run directory of the node."
_DEFAULT = "the only running node"

NodeArgument = Annotated[str, typer.Argument(help=_HELP, show_default=_DEFAULT)]
NodeOption = Annotated[str, typer.Option("--node", help=_HELP, show_default=_DEFAULT)]


def resolve_node(argument: str, option: str) -> str:
    """Return the node given as argument or option. Raises UsageError if both are given and differ."""
    if argument and option and argument != option:
        raise UsageError(f"conflicting nodes: {argument!r} and --node {option!r}; give one")
    return argument or option
