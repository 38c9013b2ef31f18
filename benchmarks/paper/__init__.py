"""Experiments of papers on disaggregated serving and vector search, as commands."""
