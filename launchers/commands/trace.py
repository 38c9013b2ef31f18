"""`trinity trace`: the timeline of a request, or of a search, in the terminal."""

from typing import Annotated
from urllib.parse import quote

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from launchers.http_client import get
from launchers.node_option import NodeOption
from runtime.node.run_dir import find_node
from runtime.serving.frontend.observability import Trace

_MAX_PROBES = 24  # lines; the longest probes are shown
_FIXED_WIDTH = 40  # columns of names and numbers
_STAGES = {
    "queue": "yellow",
    "batch": "yellow",
    "embed": "magenta",
    "retrieval": "magenta",
    "passages": "cyan",
    "admission": "yellow",
    "prefill": "blue",
    "room": "yellow",
    "pull": "cyan",
    "decode": "green",
    "respond": "cyan",
    "probe": "magenta",
}


def trace(
    request: Annotated[
        str,
        typer.Argument(help='Request id: "id" in the response, or x-request-id, sent or received.'),
    ],
    node: NodeOption = "",
    url: Annotated[str, typer.Option(help="URL of the node, such as http://host:8080.")] = "",
    key: Annotated[str, typer.Option(envvar="TRINITY_API_KEY", help="API key, if the node requires one.")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print the trace as JSON.")] = False,
) -> None:
    """Show the timeline of a request: start and duration of every stage and probe."""
    body = get(url or find_node(node).url, f"/v1/traces/{quote(request, safe='')}", key)
    if json:
        print(body.decode())
    else:
        show(msgspec.json.decode(body, type=Trace), Console())


def show(trace: Trace, console: Console) -> None:
    """Print a trace, one line per stage, with bars proportional to time."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for header in ("", "at ms", "ms", "%"):
        table.add_column(header, justify="left" if not header else "right", no_wrap=True)
    width = max(10, min(console.width, 160) - _FIXED_WIDTH)
    table.add_column("", no_wrap=True, width=width)

    def line(label: str, kind: str, begin_s: float, end_s: float) -> None:
        share = (end_s - begin_s) / trace.elapsed_s if trace.elapsed_s > 0 else 0.0
        bar = _bar(begin_s, end_s, trace.elapsed_s, width)
        table.add_row(
            label, f"{begin_s * 1e3:.1f}", f"{(end_s - begin_s) * 1e3:.1f}", f"{share:.1%}",
            f"[{_STAGES.get(kind, 'default')}]{bar}[/]",
        )  # fmt: skip

    for stage in trace.stages:
        line(stage.name, stage.name, stage.begin_s, stage.end_s)
    if trace.state == "running":
        known = max([0.0, trace.first_token_s or 0.0, *(stage.end_s for stage in trace.stages)])
        line("… until now", "running", known, trace.elapsed_s)
    shown = sorted(trace.probes, key=lambda probe: probe.begin_s - probe.end_s)[:_MAX_PROBES]
    for probe in sorted(shown, key=lambda probe: probe.begin_s):
        line(f"  probe @{probe.at_token}", "probe", probe.begin_s, probe.end_s)

    end = escape(f"{trace.state} after {trace.elapsed_s * 1e3:.1f} ms")
    called = escape(f" ({trace.client_id})") if trace.client_id else ""
    console.print(f"[bold]{escape(trace.id)}[/bold]{called}  {end}")
    console.print(escape(_summary(trace)))
    console.print(table)
    if trace.first_token_s is not None:
        later = trace.completion_tokens - 1
        each = f", {(trace.elapsed_s - trace.first_token_s) / later * 1e3:.1f} ms per later token" if later > 0 else ""
        console.print(f"first token after {trace.first_token_s * 1e3:.1f} ms{each}")
    if trace.probes:
        console.print(_probes_line(trace))
    hidden = len(trace.probes) - len(shown) + trace.probes_left_out
    if hidden:
        console.print(f"{hidden} shorter probes not shown")


def _summary(trace: Trace) -> str:
    if trace.kind == "search":
        return f"search, {trace.passages} passages"
    restarts = f", restarted {trace.restarts} times" if trace.restarts else ""
    workers = f"{trace.prefill_worker} → {trace.decode_worker}"
    return f"{workers}, {trace.prompt_tokens} tokens → {trace.completion_tokens}{restarts}"


def _probes_line(trace: Trace) -> str:
    probes = trace.probes
    stalled = sum(probe.stalled_s for probe in probes)
    number, passages = len(probes) + trace.probes_left_out, sum(probe.passages for probe in probes)
    line = f"{number} {'probe' if number == 1 else 'probes'} stalled the answer for {stalled * 1e3:.1f} ms and added "
    line += f"{passages} new {'passage' if passages == 1 else 'passages'}"
    odd = [probe.outcome for probe in probes if probe.outcome != "answered"]
    if odd:
        line += "; " + ", ".join(f"{odd.count(outcome)} {outcome}" for outcome in sorted(set(odd)))
    return line


def _bar(begin_s: float, end_s: float, whole_s: float, width: int) -> str:
    """Return a bar on a line of `width` cells, at least one mark wide."""
    if whole_s <= 0:
        return ""
    begin = min(width - 1, int(begin_s / whole_s * width))
    cells = round((end_s - begin_s) / whole_s * width)
    return " " * max(0, begin) + ("█" * min(cells, width - begin) if cells else "▏")
