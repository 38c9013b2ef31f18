"""The names of `trinity`'s commands, and where those are that have a module of their own. Standard library alone."""

OWN = ("serve", "status", "top", "restart", "stop")  # of `launchers.main`

ELSEWHERE = {  # commands and groups of commands: module and name
    "index": ("commands.index", "index_app"),
    "live": ("commands.live", "live_app"),
    "dashboards": ("commands.dashboards", "dashboards_app"),
    "workers": ("commands.workers", "workers_app"),
    "fleet": ("fleet.commands", "fleet_app"),
    "search": ("commands.index", "search"),
    "demo": ("commands.demo", "demo"),
    "config": ("commands.config", "config"),
    "doctor": ("commands.config", "doctor"),
    "trace": ("commands.trace", "trace"),
    "logs": ("commands.logs", "logs"),
    "mcp": ("commands.mcp", "serve_mcp"),
    "simulate": ("commands.simulate", "simulate_node"),
    "calibrate": ("commands.simulate", "calibrate_machine"),
}

PARSING_THEMSELVES = ("demo",)
"""Commands that are given their options unread: `launchers.bootstrap` reads the demo's before anything is installed."""
