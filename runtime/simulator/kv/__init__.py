"""KV on the simulated node: what workers hold, what they find again, and the tiers that all of them share."""
