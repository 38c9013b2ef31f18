"""The rings: fixed slots with one writer and one reader each, what lies in them, and how a sleeper is woken."""
