"""The life of requests: placed on workers, kept until they end, started again; traces and stored answers."""
