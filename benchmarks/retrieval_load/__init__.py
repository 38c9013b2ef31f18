"""Retrieval by text and by vector over HTTP, beside the raw embedder."""
