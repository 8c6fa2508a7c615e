"""Training steps compiled for accelerators that are not there: lowered, checked, compared."""
