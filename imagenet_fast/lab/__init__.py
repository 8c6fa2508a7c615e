"""What one does before and after training: benchmarks, plans, compiling for other devices."""
