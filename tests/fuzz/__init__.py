"""Fuzz tests of every boundary: input gives a typed error or a correct answer, and the next request is served."""
