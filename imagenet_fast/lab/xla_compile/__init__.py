"""Training steps compiled, checked and compared for TPUs and GPUs that are not present."""
