"""Integrations with other frameworks: each module depends on one package, and uses a node's public HTTP API."""
