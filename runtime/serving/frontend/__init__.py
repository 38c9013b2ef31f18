"""Life cycle of requests: routing to workers, restarts, traces and metrics, answer cache."""
