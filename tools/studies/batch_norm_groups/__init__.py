"""A study of batch norm over groups of replicas: its experiments and page."""
