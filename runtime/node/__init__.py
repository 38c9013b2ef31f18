"""Configuration, placement, supervision, metrics and logs of a node."""
