"""Node selection on the command line: by default the only running node.

Commands about a node take it as argument, those about something of a node (a request, workers, a collection) by --node.
"""

from typing import Annotated

import typer

_HELP = "Name or run directory of the node."
_DEFAULT = "the only running node"

NodeArgument = Annotated[str, typer.Argument(help=_HELP, show_default=_DEFAULT)]
NodeOption = Annotated[str, typer.Option("--node", help=_HELP, show_default=_DEFAULT)]
