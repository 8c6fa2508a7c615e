"""The training loop: model, callbacks, checkpoints, clock and report."""
