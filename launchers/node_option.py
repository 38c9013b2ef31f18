"""How commands are told which node they are about: the only one that runs, unless they are told.

Every command takes `--node NODE`; those that take nothing else as an argument take `NODE` too.
"""

from typing import Annotated

import typer

from runtime.errors import UsageError

_HELP = "The node's name, or its run directory."
_DEFAULT = "the only one that runs"

NodeArgument = Annotated[str, typer.Argument(help=_HELP, show_default=_DEFAULT)]
NodeOption = Annotated[str, typer.Option("--node", help=_HELP, show_default=_DEFAULT)]


def meant(argument: str, option: str) -> str:
    """The node of a command that takes it either way. Raises UsageError for two that differ."""
    if argument and option and argument != option:
        raise UsageError(f"two nodes are named: {argument!r} and --node {option!r}")
    return argument or option
