"""Tests of the node: configuration, placement, run directory, control, supervisor, metrics."""
