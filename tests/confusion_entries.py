"""A confusion matrix as an error analysis stores it."""

import numpy as np


def entries(matrix):
    """Rows of true class, answer and images: those of the numbers above 0 in a matrix."""
    matrix = np.asarray(matrix)
    places = np.nonzero(matrix)
    return np.column_stack([*places, matrix[places]])
