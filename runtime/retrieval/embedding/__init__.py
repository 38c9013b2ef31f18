"""Embedders: built in, from a model directory, or behind a server."""
