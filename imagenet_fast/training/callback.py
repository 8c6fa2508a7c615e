"""What the callbacks of a run have in common."""

from __future__ import annotations

import tf_keras as keras


class TensorsCallback(keras.callbacks.Callback):
    """A callback that gets the metrics of a step as tensors, and so need not wait for it.

    Keras reads the metrics at each step, for which it waits for the devices, if one callback of a
    run wants numbers.
    """

    _supports_tf_logs = True
