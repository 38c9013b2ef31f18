"""How commands are told which node they are about: the only one that runs, unless they are told."""

from typing import Annotated

import typer

_HELP = "The node's name, or its run directory."
_DEFAULT = "the only one that runs"

NodeArgument = Annotated[str, typer.Argument(help=_HELP, show_default=_DEFAULT)]
NodeOption = Annotated[str, typer.Option(help=_HELP, show_default=_DEFAULT)]
