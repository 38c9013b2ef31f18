"""Routes other than generation: documents, draining, embeddings, tokenization, vector stores."""
