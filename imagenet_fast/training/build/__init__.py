"""Builds what a configuration describes: network, optimizer, schedule, weights."""
