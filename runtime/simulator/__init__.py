"""A discrete-event model of a whole node: production's scheduler, router and control law on a virtual clock."""
