"""Tests of the vector pool: scheduler, worker process and search client."""
