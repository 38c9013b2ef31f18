"""Typed attributes beside documents, and filters over them."""
