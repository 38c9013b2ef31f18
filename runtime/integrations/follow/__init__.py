"""Replication of a collection of another database, the source of truth, into a collection."""
