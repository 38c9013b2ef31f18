"""`trinity top`: the first screen in a terminal, drawn anew with every look at /metrics."""

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

from dashboards import screen
from dashboards.screen import Live, Snapshot
from runtime.errors import Unavailable

_COLOURS = {"good": "green", "warn": "yellow", "bad": "bold red", "plain": ""}
_NAME_WIDTH = 17
_COLUMNS = 3
_TIMEOUT_S = 5.0


def fetch_metrics(url: str, key: str = "") -> str:
    """A node's /metrics, asked for with an API key if there is one. Raises `Unavailable`."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}/metrics", headers=headers)
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            return str(answer.read().decode())
    except (OSError, ValueError) as error:  # ValueError: not a URL, or not UTF-8
        raise Unavailable(f"no metrics from {url}: {error}") from error


class Top(App[None]):
    """Looks every `every_s` seconds; `fetch` gives /metrics' text or raises `Unavailable`."""

    CSS = """
    #title { height: 1; text-style: bold; background: $panel; padding: 0 1; }
    Grid { grid-size: 3; grid-rows: 7 8 9; grid-gutter: 0 1; height: auto; }
    Grid Static { border-top: solid $primary; text-wrap: nowrap; text-overflow: ellipsis; }
    DataTable { height: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("q", "quit", "Quit"), Binding("r", "refresh_now", "Look now")]
    ENABLE_COMMAND_PALETTE = False

    def __init__(
        self, fetch: Callable[[], str], every_s: float = 2.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._fetch = fetch
        self._every_s = every_s
        self._clock = clock
        self._live = Live()

    def compose(self) -> ComposeResult:
        yield Static(id="title")
        yield Grid()
        table: DataTable[str] = DataTable(id="workers", show_cursor=False)
        table.add_columns(*screen.WORKER_COLUMNS)
        yield table
        yield Footer()

    def on_mount(self) -> None:
        self.set_interval(self._every_s, self.action_refresh_now)
        self.action_refresh_now()

    def action_refresh_now(self) -> None:
        """Look now; one look at a time, and never in the way of the keyboard."""
        self.run_worker(self._look, thread=True, exclusive=True, group="look")

    def _look(self) -> None:
        try:
            snapshot = Snapshot.parse(self._clock(), self._fetch())
        except (Unavailable, ValueError) as error:
            self.call_from_thread(self._say, str(error))
            return
        self.call_from_thread(self._show, snapshot)

    def _say(self, trouble: str) -> None:
        self.query_one("#title", Static).update(Text(trouble, "bold red"))

    def _show(self, snapshot: Snapshot) -> None:
        self._live.add(snapshot)
        self.query_one("#title", Static).update(Text(screen.title(self._live)))
        sections = screen.sections(self._live)
        grid = self.query_one(Grid)
        grid.mount_all(Static() for _ in range(len(grid.children), len(sections)))
        width = self.size.width // _COLUMNS - 1
        for box, section in zip(grid.query_children(Static), sections, strict=True):
            box.border_title = section.title
            box.update(Text("\n").join(_line(line, width) for line in section.lines))
        table = self.query_one("#workers", DataTable)
        table.clear()
        for row in screen.workers(self._live):
            table.add_row(*row)


def _line(line: screen.Line, width: int) -> Text:
    """The figures stand below each other; a long one takes the room that its name leaves."""
    column = min(_NAME_WIDTH, width - len(line.text) - 1)
    return Text.assemble((f"{line.name:<{max(column, 0)}} ", "dim"), (line.text, _COLOURS[line.mood]))
