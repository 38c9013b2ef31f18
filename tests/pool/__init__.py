"""Tests of the vector pool: scheduler, process, and the client that asks it."""
