"""Memory that processes share, on the host and on GPUs, and the words in it that they agree by."""
