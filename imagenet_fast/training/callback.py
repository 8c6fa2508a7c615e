"""Base class of the run's callbacks."""

from __future__ import annotations

import tf_keras as keras


class TensorsCallback(keras.callbacks.Callback):
    """A callback that gets a step's metrics as tensors.

    If any callback of a run wants numbers, Keras waits for the devices at each step.
    """

    _supports_tf_logs = True
