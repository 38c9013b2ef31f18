"""Typed attributes of documents, and filters on them."""
