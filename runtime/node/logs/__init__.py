"""Log files of a node: writing and merged reading."""
