"""The `trinity` command."""

import importlib
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace
from rich.console import Console

from gpu import GpuError
from ipc import IpcError
from launchers.commands import ELSEWHERE, PARSING_THEMSELVES
from launchers.node_option import NodeArgument, NodeOption, meant
from launchers.status import show_placement, show_status
from runtime.checks import preflight
from runtime.checks.memory_estimate import estimate_device_bytes
from runtime.errors import EXIT_FAILED, TrinityError
from runtime.node.config_file import load_config
from runtime.node.logs.log import LEVELS, log_to_stderr
from runtime.node.placement.layout import lay_out
from runtime.node.placement.machine import Machine
from runtime.node.run_dir import NodeInfo, find_node
from runtime.node.supervisor.admin import restart_node, stop_node
from runtime.node.supervisor.listen import check_host
from runtime.node.supervisor.node_metrics import node_version
from runtime.node.supervisor.supervisor import Supervisor
from runtime.node.worker import die_with_parent


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"trinity {node_version() or 'of a checkout that is not installed'}")
        raise typer.Exit


def options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Retrieval for LLM serving on one node: prefill, decode and vector search, each in processes of its own."""


def serve(
    config: Annotated[Path, typer.Option(help="The node's TOML file.")],
    quiet: Annotated[bool, typer.Option(help="Log warnings and errors only.")] = False,
    with_parent: Annotated[
        int | None, typer.Option(metavar="PID", help="Drain and stop when this process, which started it, ends.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check the configuration and show where everything would run; exit with 1 if it does not fit.",
        ),
    ] = False,
    simulate_gpus: Annotated[
        int, typer.Option(help="Run the layout of so many GPUs on the CPU, each GPU a name alone.", min=0)
    ] = 0,
    name: Annotated[str, typer.Option(help="The node's name, instead of the file's: several can run from one.")] = "",
    port: Annotated[int | None, typer.Option(help="The port of HTTP, instead of the file's; 0: any free one.")] = None,
) -> None:
    """Run a node in the foreground until Ctrl-C or `trinity stop` (drains; a second Ctrl-C stops at once)."""
    settings = load_config(config, name, port)
    if quiet and LEVELS[settings.log.level] < logging.WARNING:
        settings = replace(settings, log=replace(settings.log, level="warning"))
    log = logging.getLogger("supervisor")
    if with_parent is not None:
        die_with_parent(with_parent, signal.SIGTERM)

    def announce(info: NodeInfo) -> None:
        log.info("node %r serves at %s", info.name, info.url)

    with log_to_stderr(settings.log, "supervisor"):
        check_host(settings.http)
        machine = Machine.with_simulated_gpus(simulate_gpus) if simulate_gpus else Machine.read()
        plan = lay_out(settings, machine)
        if dry_run:
            preflight.check_without_start(plan)
            for line in preflight.unverified_collections(settings):
                print(line)
            raise typer.Exit(0 if show_placement(plan, machine, estimate_device_bytes(plan, machine)) else 1)
        preflight.check(plan, _logged_once(log), machine)
        raise typer.Exit(Supervisor(plan).run(announce))


def _logged_once(log: logging.Logger) -> Callable[[str, float], None]:
    """A progress callback for logs: a line for each phase, none for its steps."""
    phases: set[str] = set()

    def progress(phase: str, share: float) -> None:
        if phase not in phases:
            log.info("%s", phase)
        phases.add(phase)

    return progress


def status(node: NodeArgument = "", named: NodeOption = "") -> None:
    """Show a running node's workers. Exits with 1 if one of them is not ready."""
    raise typer.Exit(show_status(find_node(meant(node, named)), Console()))


def top(
    node: NodeArgument = "",
    named: NodeOption = "",
    url: Annotated[str, typer.Option(help="Watch the node at this address instead, such as http://host:8080.")] = "",
    every: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.2, max=60)] = 2.0,
    key: Annotated[str, typer.Option(envvar="TRINITY_API_KEY", help="An API key, if /metrics wants one.")] = "",
) -> None:
    """Watch a node in the terminal: what the Grafana overview shows first. Ends with q."""
    from dashboards.top import TopApp, fetch_metrics  # textual takes its time to import

    address = url or find_node(meant(node, named)).url
    fetch_metrics(address, key)  # what is wrong with the address is said in one line, not on a screen
    TopApp(lambda: fetch_metrics(address, key), every).run()


def restart(
    node: NodeArgument = "",
    named: NodeOption = "",
    worker: Annotated[str, typer.Option(help="Restart this worker alone, such as prefill-0.")] = "",
    timeout: Annotated[float, typer.Option(help="Seconds to wait for all to be back.")] = 1800.0,
) -> None:
    """Restart a node's workers one after the other, each after its drain; returns when all are back."""
    restart_node(find_node(meant(node, named)), worker, timeout)
    print(f"{worker or 'every worker'} restarted")


def stop(
    node: NodeArgument = "",
    named: NodeOption = "",
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the node to end.")] = 60.0,
) -> None:
    """Drain a running node and stop it; returns when it is gone."""
    info = find_node(meant(node, named))
    stop_node(info, timeout)
    print(f"node {info.name!r} stopped")


_UNREAD = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def command_line(arguments: Sequence[str] = ()) -> typer.Typer:
    """The command line, with the one command that `arguments` name, or with all (for --help).

    A command's module is imported where that command runs and nowhere else: `serve` begins so much earlier.
    """
    app = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
    )
    app.callback()(options)
    own = {function.__name__: function for function in (serve, status, top, restart, stop)}
    named = next((word for word in arguments if not word.startswith("-")), "")
    for name, function in own.items():
        app.command(name)(function)
    for name in [named] if named in own | ELSEWHERE else ELSEWHERE:
        if name in ELSEWHERE:
            module, attribute = ELSEWHERE[name]
            found = getattr(importlib.import_module(f"launchers.{module}"), attribute)
            settings = _UNREAD if name in PARSING_THEMSELVES else None
            if isinstance(found, typer.Typer):
                app.add_typer(found, name=name)
            else:
                app.command(name, context_settings=settings)(found)
    return app


def main() -> None:
    """Run the command line: what the user can mend is one line on stderr and an exit code, never a traceback.

    The code is the error's own: docs/operate.md has all of them.
    """
    try:
        command_line(sys.argv[1:])(prog_name="trinity")
    except (TrinityError, GpuError, IpcError) as error:
        print(f"trinity: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code if isinstance(error, TrinityError) else EXIT_FAILED)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
