"""Server end of sessions."""
