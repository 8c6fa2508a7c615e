"""A study of large batches: its experiments, tables and plots."""
