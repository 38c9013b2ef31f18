"""Discrete-event simulator of a node: production's scheduler, router and control law on a virtual clock."""
