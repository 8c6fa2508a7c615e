"""A study of batch norm over groups of replicas: what is trained, and its page."""
