"""``imagenet-fast doctor``: checks that a machine, or a cluster, is ready for training."""
