"""The supervisor: lifecycle of worker processes, and the admin protocol."""
