"""Benchmarks of the gradient all-reduce algorithms."""
