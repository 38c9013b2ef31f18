"""Names of `trinity`'s commands and their modules. Uses the standard library alone."""

MAIN_COMMANDS = ("serve", "status", "top", "restart", "stop")  # defined in `launchers.main`

LAZY_COMMANDS = {  # command or command group → module and attribute, imported on use
    "index": ("commands.index", "index_app"),
    "dashboards": ("commands.dashboards", "dashboards_app"),
    "workers": ("commands.workers", "workers_app"),
    "search": ("commands.index", "search"),
    "demo": ("commands.demo", "demo"),
    "config": ("commands.config", "config"),
    "doctor": ("commands.config", "doctor"),
    "precompile": ("commands.precompile", "precompile"),
    "trace": ("commands.trace", "trace"),
    "logs": ("commands.logs", "logs"),
    "mcp": ("commands.mcp", "serve_mcp"),
    "simulate": ("commands.simulate", "simulate_node"),
    "calibrate": ("commands.simulate", "calibrate_machine"),
}
