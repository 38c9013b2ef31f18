"""Hostile input to every boundary: it ends in a typed error or a right answer, and the next one is served."""
