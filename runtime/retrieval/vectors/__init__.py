"""Query vectors from wherever they are."""
