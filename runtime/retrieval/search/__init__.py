"""The search client: a node's pools, replicas and shards behind one call."""
