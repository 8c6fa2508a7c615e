"""The parts of ``tools/tune.py``: search space, study, trials and results."""
