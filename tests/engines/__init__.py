"""Tests of the engines: one contract for all, and what is each one's own."""
