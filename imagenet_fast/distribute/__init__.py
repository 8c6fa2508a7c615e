"""Strategies, devices, worker processes and all-reduces."""
