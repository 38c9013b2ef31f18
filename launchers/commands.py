"""The names of `trinity`'s commands, and where those are that have a module of their own. Standard library alone."""

OWN = ("serve", "status", "top", "restart", "stop")  # of `launchers.main`

ELSEWHERE = {  # commands and groups of commands: module and name
    "index": ("index_commands", "index_app"),
    "live": ("live_commands", "live_app"),
    "dashboards": ("dashboard_commands", "dashboards_app"),
    "workers": ("workers_commands", "workers_app"),
    "fleet": ("fleet.commands", "fleet_app"),
    "search": ("index_commands", "search"),
    "demo": ("demo", "demo"),
    "config": ("config_command", "config"),
    "doctor": ("config_command", "doctor"),
    "trace": ("trace_command", "trace"),
    "logs": ("logs_command", "logs"),
    "simulate": ("simulate_command", "simulate_node"),
    "calibrate": ("simulate_command", "calibrate_machine"),
}

PARSING_THEMSELVES = ("demo",)
"""Commands that are given their options unread: `launchers.bootstrap` reads the demo's before anything is installed."""
