"""One extend of a running batch on a CPU, stage by stage, and what becomes of the slots that it finishes."""
