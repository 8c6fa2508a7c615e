"""Training runs: the loop, and what it starts with, follows and ends with."""
