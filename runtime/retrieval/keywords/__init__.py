"""Keyword search over texts: words, inverted indexes, ranks by BM25."""
