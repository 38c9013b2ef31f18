"""The node as a whole: its configuration, its supervisor, and the tables its workers write."""
