"""Benchmarks of the optimizers, including Model Garden's LARS."""
