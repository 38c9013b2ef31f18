"""Collections of documents: storing, embedding, building, and asking the pool for the nearest."""
