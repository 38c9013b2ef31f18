"""The search client: queries to vector pools."""
