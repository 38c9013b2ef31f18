"""The vector pool: its process and the scheduler that fills its slots."""
