"""What a step of each stage costs: defaults, or measured here."""
