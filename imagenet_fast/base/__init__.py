"""Shared by all folders: options, errors, files, paths, durations, processes, plots."""
