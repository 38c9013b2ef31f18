"""The control loop and the role planner."""
