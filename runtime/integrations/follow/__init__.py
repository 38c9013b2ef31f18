"""Keeping a live collection as a collection of another database is: which stays the source of truth."""
