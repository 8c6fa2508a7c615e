"""Published times beside those that the cost model predicts."""
