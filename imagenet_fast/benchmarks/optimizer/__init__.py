"""Optimizers against each other, and LARS against Model Garden's."""
