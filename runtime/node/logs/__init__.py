"""Logs: written by every process, read together."""
