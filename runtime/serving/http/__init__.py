"""The HTTP interface: OpenAI's routes and our own, in front of an engine."""
