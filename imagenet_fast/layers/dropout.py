"""Dropout with reproducible noise, also in resumed runs."""

from __future__ import annotations

import random
from typing import Any

import keras
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.keras_2 import per_replica_variable
from imagenet_fast.layers.seeds import next_seed


@keras.saving.register_keras_serializable("imagenet_fast")
class Dropout(keras.layers.Layer):
    """Sets a fraction of its inputs to 0 in training, and scales up the rest.

    The noise is a function of a key, the number of calls in training, and the replica, see
    ``layers.seeds``. The key is drawn once from Python's random generator
    (``keras.utils.set_random_seed``). Key and count are weights, so checkpoints include them.

    Args:
      rate: fraction to set to 0, in [0, 1).
      **kwargs: Keras' options (``name``, ``dtype``).

    Raises:
      UserError: if the rate is out of range.
    """

    draws_by_replica = True

    def __init__(self, rate: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not 0 <= rate < 1:
            raise UserError(f"rate is {rate}, but must be at least 0 and below 1")
        self.rate = rate

    def build(self, input_shape: Any) -> None:
        """Makes the key and the count, int64 [2]: a copy in each replica, with equal values."""
        key = random.randrange(2**31)
        self.state = per_replica_variable(
            self,
            "state",
            [2],
            lambda shape, dtype=None: tf.constant([key, 0], dtype, shape),
            dtype="int64",
        )
        super().build(input_shape)

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        """Applies dropout if ``training``."""
        if not training or not self.rate:
            return tf.identity(inputs)
        seed = next_seed(self.state, self)
        return tf.nn.experimental.stateless_dropout(inputs, self.rate, seed)

    def get_build_config(self) -> None:
        """Defers building to the first call, which names the weight after the layer."""

    def get_config(self) -> dict[str, Any]:
        """Returns all options, for saving."""
        return {**super().get_config(), "rate": self.rate}
