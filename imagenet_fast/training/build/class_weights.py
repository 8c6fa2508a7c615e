"""Weights of classes in the training loss."""

from __future__ import annotations

import numpy as np

from imagenet_fast.base.errors import UserError
from imagenet_fast.data.class_values import BALANCED, read_class_values
from imagenet_fast.data.info import DatasetInfo
from imagenet_fast.optimizers.options import UpdateOptions


def make_class_weights(options: UpdateOptions, info: DatasetInfo) -> np.ndarray | None:
    """Returns the weight of each class, float64 [classes]; None: all are 1.

    ``balanced`` weights are images / (classes * images of the class), as scikit-learn's.

    Args:
      options: give ``class_weights``, and the ``model_dir`` of a run that may resume without the
        file of its weights.
      info: the data set.

    Raises:
      UserError: if the data has no manifest, or a file cannot be used.
    """
    if not options.class_weights:
        return None
    if options.class_weights != BALANCED:
        return read_class_values(
            "class_weights", options.class_weights, info.labels, options.model_dir
        )
    counts = np.array(info.splits["train"].class_counts, np.float64)
    if not counts.size:
        raise UserError(
            "class_weights=balanced needs the number of images of each class: prepare the data "
            "with `imagenet-fast prepare`, or give a file of weights"
        )
    # A class without images has no part in the loss.
    return counts.sum() / (len(counts) * np.maximum(counts, 1))
