"""Ingestion: files into collections of passages."""
