"""Vector stores and files that clients create: one collection of passages, files on disk, and a catalogue of both."""
