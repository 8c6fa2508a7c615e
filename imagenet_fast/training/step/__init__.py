"""One training step: from a batch to the weight update."""
