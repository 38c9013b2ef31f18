"""The stages of an extend on a CPU, and the results of finished slots."""
