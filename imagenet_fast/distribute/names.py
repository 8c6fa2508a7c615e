"""The names by which sums of gradients are chosen; nothing here imports TensorFlow."""

ALL_REDUCE_ALGORITHMS = ("auto", "builtin", "flat", "hierarchical", "torus_2d")
ALL_REDUCE_DTYPES = ("float32", "float16", "bfloat16")
