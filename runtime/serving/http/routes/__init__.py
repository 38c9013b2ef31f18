"""Routes beside those that generate: documents, embeddings, tokens, vector stores."""
