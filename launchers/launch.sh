#!/usr/bin/env bash
# Start a node in the foreground without systemd: raises limits, runs the doctor, drains on SIGTERM and Ctrl-C.
# Copy it and edit the two defaults, or set TRINITY and CONFIG. Options are passed to `trinity serve`.
set -euo pipefail
TRINITY=${TRINITY:-trinity}
CONFIG=${CONFIG:-/etc/trinity/node.toml}

ulimit -n "$(ulimit -H -n)"
ulimit -l "$(ulimit -H -l)"
"$TRINITY" doctor --config "$CONFIG"
exec "$TRINITY" serve --config "$CONFIG" "$@"
