"""Client end of sessions."""
