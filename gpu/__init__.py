"""Vector search on one device: the index, building it, and the engine that searches it by the extend."""
