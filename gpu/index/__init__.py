"""The graph index: encoded vectors and a graph over them, in memory and on disk."""
