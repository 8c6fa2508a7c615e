"""``imagenet-fast doctor``: whether a machine, or a cluster, is as training needs it."""
