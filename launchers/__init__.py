"""The `trinity` command line, bootstrap and deployment files."""
