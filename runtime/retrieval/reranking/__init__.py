"""Reranking: cross-encoders, from a model directory or behind a server, and their use within a deadline."""
