"""Algorithms of the gradient all-reduce against each other."""
