"""Tests of the engines: a contract for all, and tests of each one."""
