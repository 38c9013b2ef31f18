#!/usr/bin/env bash
# Start a node without systemd, in the foreground: checks first, generous limits, drains on TERM and Ctrl-C.
# Copy it and set the two defaults, or set TRINITY and CONFIG. Options go to `trinity serve`.
set -euo pipefail
TRINITY=${TRINITY:-trinity}
CONFIG=${CONFIG:-/etc/trinity/node.toml}

ulimit -n "$(ulimit -H -n)"
ulimit -l "$(ulimit -H -l)"
"$TRINITY" doctor --config "$CONFIG"
exec "$TRINITY" serve --config "$CONFIG" "$@"
