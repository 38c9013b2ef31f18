"""A session as its client has it."""
