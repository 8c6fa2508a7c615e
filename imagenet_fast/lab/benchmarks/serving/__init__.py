"""Benchmarks of exported models in each format."""
