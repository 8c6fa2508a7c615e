"""What follows a run: rows, progress bar, TensorBoard, trackers, profiler."""
