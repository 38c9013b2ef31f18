"""Opening of sessions between clients and pools: messages, request parameters, and the arena of vectors."""
