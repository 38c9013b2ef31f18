"""Rings of fixed slots with one producer and one consumer, their messages, and the doorbells that wake a consumer."""
