"""`trinity top`: a Textual app that shows a node's overview in the terminal, refreshed from /metrics."""

import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Grid
from textual.widgets import DataTable, Footer, Static

from dashboards import terminal_overview
from dashboards.terminal_overview import MetricWindow, Snapshot
from runtime.errors import Unavailable

_COLOURS = {"good": "green", "warn": "yellow", "bad": "bold red", "plain": ""}
_NAME_WIDTH = 17
_COLUMNS = 3
_TIMEOUT_S = 5.0


def fetch_metrics(url: str, key: str = "") -> str:
    """Fetch a node's /metrics, with an API key if given. Raises `Unavailable`."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}/metrics", headers=headers)
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            return str(answer.read().decode())
    except (OSError, ValueError) as error:  # ValueError: invalid URL or UTF-8
        raise Unavailable(f"no metrics from {url}: {error}") from error


class TopApp(App[None]):
    """Refreshes every `every_s` seconds; `fetch` returns the text of /metrics or raises `Unavailable`."""

    CSS = """
    #title { height: 1; text-style: bold; background: $panel; padding: 0 1; }
    Grid { grid-size: 3; grid-rows: 7 8 9; grid-gutter: 0 1; height: auto; }
    Grid Static { border-top: solid $primary; text-wrap: nowrap; text-overflow: ellipsis; }
    DataTable { height: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("q", "quit", "Quit"), Binding("r", "refresh_now", "Refresh")]
    ENABLE_COMMAND_PALETTE = False

    def __init__(
        self, fetch: Callable[[], str], every_s: float = 2.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._fetch = fetch
        self._every_s = every_s
        self._clock = clock
        self._window = MetricWindow()

    def compose(self) -> ComposeResult:
        yield Static(id="title")
        yield Grid()
        table: DataTable[str] = DataTable(id="workers", show_cursor=False)
        table.add_columns(*terminal_overview.WORKER_COLUMNS)
        yield table
        yield Footer()

    def on_mount(self) -> None:
        self.set_interval(self._every_s, self.action_refresh_now)
        self.action_refresh_now()

    def action_refresh_now(self) -> None:
        """Refresh in a thread, one at a time, so that the keyboard stays responsive."""
        self.run_worker(self._refresh_metrics, thread=True, exclusive=True, group="refresh")

    def _refresh_metrics(self) -> None:
        try:
            snapshot = Snapshot.parse(self._clock(), self._fetch())
        except (Unavailable, ValueError) as error:
            self.call_from_thread(self._show_error, str(error))
            return
        self.call_from_thread(self._show, snapshot)

    def _show_error(self, message: str) -> None:
        self.query_one("#title", Static).update(Text(message, "bold red"))

    def _show(self, snapshot: Snapshot) -> None:
        self._window.add(snapshot)
        self.query_one("#title", Static).update(Text(terminal_overview.title(self._window)))
        sections = terminal_overview.sections(self._window)
        grid = self.query_one(Grid)
        grid.mount_all(Static() for _ in range(len(grid.children), len(sections)))
        width = self.size.width // _COLUMNS - 1
        for box, section in zip(grid.query_children(Static), sections, strict=True):
            box.border_title = section.title
            box.update(Text("\n").join(_line(line, width) for line in section.lines))
        table = self.query_one("#workers", DataTable)
        table.clear()
        for row in terminal_overview.worker_rows(self._window):
            table.add_row(*row)


def _line(line: terminal_overview.Line, width: int) -> Text:
    """Align values in a column; a long value moves left into the space of its name."""
    column = min(_NAME_WIDTH, width - len(line.text) - 1)
    return Text.assemble((f"{line.name:<{max(column, 0)}} ", "dim"), (line.text, _COLOURS[line.status]))
