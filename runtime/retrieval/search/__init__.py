"""The search client: queries to vector pools and other nodes."""
