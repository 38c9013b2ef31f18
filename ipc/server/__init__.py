"""Sessions as their pool has them."""
