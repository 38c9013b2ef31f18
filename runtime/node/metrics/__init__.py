"""Metrics of a node: declarations, the workers' tables, and the Prometheus exporter."""
