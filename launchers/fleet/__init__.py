"""Nodes under Ray Serve and on Kubernetes. `docs/fleet.md` describes a node's contract with load balancers."""
