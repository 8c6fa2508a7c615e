"""Pipeline parallelism over micro-batches: GPipe (Huang et al. 2018)."""
