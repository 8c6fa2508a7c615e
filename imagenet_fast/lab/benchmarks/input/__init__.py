"""Benchmarks of the input pipeline, of its stages and of other input pipelines."""
