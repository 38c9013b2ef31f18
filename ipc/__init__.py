"""What two processes of a node share: memory, rings, doorbells, sessions, and the KV hand-over channel."""
