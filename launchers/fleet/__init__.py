"""`trinity fleet`: load balancers in front of several nodes. `docs/fleet.md` describes a node's contract with them."""
