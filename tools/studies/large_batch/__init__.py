"""A study of large batches: what is trained, the runs and their log, tables and pictures."""
