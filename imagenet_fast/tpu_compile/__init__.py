"""Training steps as programs for TPUs that are not there: made, checked, compiled, compared."""
