"""Planning of a node's workers, and their layout on a machine."""
