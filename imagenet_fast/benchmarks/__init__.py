"""Times of this package's parts against other ways to do the same, for `imagenet-fast benchmark`.

Each benchmark returns a :class:`~imagenet_fast.benchmarks.timing.Comparison`;
``imagenet_fast.benchmarks.report`` prints it, writes it and draws it.
"""
