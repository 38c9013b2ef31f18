"""What a person watches: panels, alerts and their generated JSON."""
