"""The supervisor: a node's worker processes, their lives, and the admin socket."""
