"""Simulated workers and requests."""
