"""Collections on disk: built, verified, opened."""
