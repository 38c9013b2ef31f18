"""Collections of documents: storage, embedding, building, and search through the vector pools."""
