"""From a configuration to a plan, and the plan laid out on a machine."""
