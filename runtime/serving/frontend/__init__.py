"""The frontend: HTTP in, requests placed on workers and kept until they end, answers out."""
