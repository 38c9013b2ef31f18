"""Load balancers in front of nodes, and the node's contract with them."""
