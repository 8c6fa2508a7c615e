"""Plays faults against training runs."""
