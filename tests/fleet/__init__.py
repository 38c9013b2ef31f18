"""What stands in front of many nodes, and what a node promises it."""
