"""Frontend process and its HTTP API: OpenAI's routes and Trinity's own, in front of an engine."""
