"""Benchmarks of the package's parts against other implementations: ``imagenet-fast benchmark``.

Each benchmark measures with :mod:`imagenet_fast.lab.benchmarks.timing` and returns its results as
a :class:`~imagenet_fast.lab.benchmarks.report.Report`, which is printed and written as text, JSON
and a plot.
"""
