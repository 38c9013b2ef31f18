"""What a client and a pool say to open a session, and on what terms."""
