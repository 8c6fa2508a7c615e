"""Benchmarks of pipeline parallelism."""
