"""What other frameworks find passages with: each file stands on one package, and asks a node over its public HTTP."""
