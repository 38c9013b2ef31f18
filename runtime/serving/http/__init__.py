"""The frontend's process and its HTTP interface: OpenAI's routes and our own, in front of an engine."""
