"""What every other folder may use: errors, files, paths, durations, processes, plots."""
