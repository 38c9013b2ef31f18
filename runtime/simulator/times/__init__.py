"""Service times of the stages: defaults, or measured by calibration."""
