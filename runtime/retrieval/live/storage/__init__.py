"""A live collection on disk: its manifest, its log, its sealed segments, and how far each reader has come."""
