"""The parts of ``tools/tune.py``: what to search, the study, its trials, its results."""
