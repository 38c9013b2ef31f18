"""The collections of a pool worker: which it serves, its indexes of each, and how they change while it runs."""
