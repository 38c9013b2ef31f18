"""The `trinity` command and what brings a node up."""
