"""`trinity fleet`: what stands in front of several nodes. `docs/fleet.md` has what a node promises it."""
