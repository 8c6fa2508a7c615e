"""Estimates of a run before it starts: its time, memory, price and learning rates."""
