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

from gpu import GpuError
from ipc import IpcError
from launchers.commands import LAZY_COMMANDS
from launchers.node_option import NodeArgument
from runtime.checks import gpu_sharing, preflight
from runtime.checks.memory_estimate import estimate
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


def _show_version(requested: bool) -> None:
    if requested:
        print(f"trinity {node_version() or '(not installed)'}")
        raise typer.Exit


def options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Retrieval runtime for LLM serving on one node: prefill, decode and vector search in separate processes."""


def serve(
    # readable: like other errors of files, one that may not be read is found by reading it, and exits with 78, not 2
    config: Annotated[Path, typer.Option(readable=False, help="Configuration file of the node (TOML).")],
    quiet: Annotated[bool, typer.Option(help="Log warnings and errors only.")] = False,
    with_parent: Annotated[
        int | None, typer.Option(metavar="PID", help="Drain and stop when this parent process ends.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check the configuration and show the placement of all processes.",
        ),
    ] = False,
    simulate_gpus: Annotated[int, typer.Option(help="Run the layout of this many GPUs on the CPU.", min=0)] = 0,
    name: Annotated[str, typer.Option(help="Node name; overrides the file, to run several nodes from one.")] = "",
    port: Annotated[int | None, typer.Option(help="HTTP port; overrides the file; 0 selects a free one.")] = None,
) -> None:
    """Run a node in the foreground. Ctrl-C or `trinity stop` drains it; a second Ctrl-C stops it at once."""
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
            from launchers.status import show_placement  # importing rich would delay a start

            preflight.check_without_start(plan)
            for line in preflight.unverified_collections(settings):
                print(line)
            show_placement(plan, machine, estimate(plan, machine))
            preflight.check_memory(plan, machine)
            return
        preflight.check(plan, _logged_once(log), machine)
        for finding in gpu_sharing.findings(plan):
            if finding.level != "ok":
                log.warning("%s %s; %s", finding.subject, finding.text, finding.advice)
        needs = estimate(plan, machine)
        free = {worker.name: needs[worker.name].free(worker) for worker in plan.workers}
        code = Supervisor(plan, device_bytes=free).run(announce)
        for kind in (signal.SIGINT, signal.SIGTERM):  # the node has stopped: a late signal does not change the code
            signal.signal(kind, signal.SIG_IGN)
        raise typer.Exit(code)


def _logged_once(log: logging.Logger) -> Callable[[str, float], None]:
    """Return a progress callback that logs each phase once."""
    phases: set[str] = set()

    def progress(phase: str, share: float) -> None:
        if phase not in phases:
            log.info("%s", phase)
        phases.add(phase)

    return progress


def status(node: NodeArgument = "") -> None:
    """Show the workers of a running node. Exits with 1 if any is not ready."""
    from rich.console import Console

    from launchers.status import show_status

    raise typer.Exit(show_status(find_node(node), Console()))


def top(
    node: NodeArgument = "",
    url: Annotated[str, typer.Option(help="URL of the node, such as http://host:8080.")] = "",
    every: Annotated[float, typer.Option(help="Refresh interval in seconds.", min=0.2, max=60)] = 2.0,
    key: Annotated[str, typer.Option(envvar="TRINITY_API_KEY", help="API key, if /metrics requires one.")] = "",
) -> None:
    """Monitor a node in the terminal: SLOs, health, queues, saturation, latency, workers. Ctrl-C ends it."""
    from dashboards.top import show  # importing rich would delay a start
    from launchers.http_client import get

    address = url or find_node(node).url
    show(lambda: get(address, "/metrics", key).decode(), every)


def restart(
    node: NodeArgument = "",
    worker: Annotated[str, typer.Option(help="Restart only this worker, such as prefill-0.")] = "",
    timeout: Annotated[float, typer.Option(help="Seconds to wait until all workers are ready again.")] = 1800.0,
) -> None:
    """Restart a node's workers one at a time, each after draining it; return when all are ready."""
    restart_node(find_node(node), worker, timeout)
    print(f"{worker or 'all workers'} restarted")


def stop(
    node: NodeArgument = "",
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the node to exit.")] = 60.0,
) -> None:
    """Drain a running node and stop it; return when it has exited."""
    info = find_node(node)
    stop_node(info, timeout)
    print(f"node {info.name!r} stopped")


def command_line(arguments: Sequence[str] = ()) -> typer.Typer:
    """Return the command line with the command that `arguments` select, or with all of them (for --help).

    Only the selected command's module is imported, which shortens the start of `serve`.
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
    for name in [named] if named in own | LAZY_COMMANDS else LAZY_COMMANDS:
        if name in LAZY_COMMANDS:
            module, attribute = LAZY_COMMANDS[name]
            target = getattr(importlib.import_module(f"launchers.{module}"), attribute)
            if isinstance(target, typer.Typer):
                app.add_typer(target, name=name)
            else:
                app.command(name)(target)
    return app


def main() -> None:
    """Run the command line. Expected errors are printed as one line on stderr, without a traceback.

    The exit code is the error's own; docs/operate.md lists them.
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
