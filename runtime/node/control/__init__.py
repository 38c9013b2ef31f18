"""The control loop: from how the node fares to the pool's knobs."""
