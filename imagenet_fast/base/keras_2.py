"""What differs between Keras 3 and Keras 2, which TensorFlow 2.15 has and TensorFlow Addons need.

The package is written for Keras 3; here is what it takes from there, and the same for Keras 2.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import keras
import tensorflow as tf

KERAS_2 = keras.__version__.startswith("2.")

if KERAS_2:
    _SAME = """cast convert_to_tensor logical_and matmul maximum minimum reshape sin sqrt square
    stack transpose unstack where"""
    ops: Any = SimpleNamespace(clip=tf.clip_by_value, sum=tf.reduce_sum, take=tf.gather)
    vars(ops).update({name: getattr(tf, name) for name in _SAME.split()})
else:
    ops = keras.ops


class _Optimizer(keras.optimizers.Optimizer):
    """Keras 2's optimizer with the methods of Keras 3's that this package uses."""

    def __init__(self, learning_rate: Any, name: str, **kwargs: Any) -> None:
        super().__init__(name=name, **{"jit_compile": False, **kwargs})
        self._learning_rate = self._build_learning_rate(learning_rate)
        self.built = False

    def build(self, variables: Sequence[tf.Variable]) -> None:
        super().build(variables)
        self.built = True

    def add_optimizer_variables(self, variables: Any, name: str) -> list[tf.Variable]:
        return [self.add_variable_from_reference(variable, name) for variable in variables]

    def assign(self, variable: tf.Variable, value: tf.Tensor) -> None:
        variable.assign(value)

    def get_config(self) -> dict[str, Any]:
        rate = self._serialize_hyperparameter(self._learning_rate)
        return {**super().get_config(), "learning_rate": rate}

    def _get_variable_index(self, variable: tf.Variable) -> int:
        return self._index_dict[self._var_key(variable)]

    def prepared(self, pairs: Any) -> Any:
        return pairs

    def _internal_apply_gradients(self, grads_and_vars: Any) -> Any:
        return super()._internal_apply_gradients(self.prepared(grads_and_vars))

    def _update_step(self, gradient: Any, variable: tf.Variable) -> None:
        self.update_step(gradient, variable, self.learning_rate)


Optimizer: Any = _Optimizer if KERAS_2 else keras.optimizers.Optimizer
# Of symbolic calls of networks, which Keras 2 would then not train.
NOT_TRAINING: dict[str, Any] = {} if KERAS_2 else {"training": False}
# With which a network that has such a call in it is not trained either, and ``fit`` traces a step
# for the shapes of its first batch.
KERAS_3_16 = tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 16)
new_variable = getattr(keras, "Variable", tf.Variable)


def per_replica_variable(
    layer: keras.layers.Layer,
    name: str,
    shape: Sequence[int],
    initializer: Any,
    *,
    dtype: str = "float32",
    aggregation: str = "only_first_replica",
) -> Any:
    """Returns a weight, not trainable, of which each replica has a copy of its own.

    ``aggregation`` is of the copies, where the weight is read from outside of the replicas.
    """
    if KERAS_2:
        return layer.add_weight(
            name=name,
            shape=shape,
            dtype=dtype,
            initializer=initializer,
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=getattr(tf.VariableAggregation, aggregation.upper()),
        )
    with keras.name_scope(layer.name, caller=layer):
        return keras.Variable(
            initializer,
            shape=shape,
            dtype=dtype,
            trainable=False,
            autocast=False,
            aggregation=aggregation,
            synchronization="on_read",
            name=name,
        )


def apply_summed_in_keras_2(
    optimizer: Any, inner: Any, gradients: Sequence[tf.Tensor], variables: Sequence[tf.Variable]
) -> None:
    """Updates variables by gradients of the scaled loss, summed over the replicas.

    ``inner`` is the optimizer, of Keras 2 or of TensorFlow Addons, without its loss scale.
    """
    if optimizer is not inner:
        gradients = optimizer.get_unscaled_gradients(gradients)
    legacy = isinstance(inner, keras.optimizers.legacy.Optimizer)  # as in TensorFlow Addons
    aggregates = {"experimental_aggregate_gradients": False}
    summed = aggregates if legacy else {"skip_gradients_aggregation": True}
    optimizer.apply_gradients(zip(gradients, variables), **summed)


def name_numbers() -> dict[Any, Any]:
    """Returns the numbers from which Keras makes the names of layers unique."""
    if KERAS_2:
        return keras.src.backend.get_default_graph_uid_map()
    from keras.src.backend.common import global_state

    return global_state.get_global_attribute(
        "object_name_uids", collections.defaultdict(int), set_to_default=True
    )


def tensorflow_variables(variables: Sequence[Any]) -> list[tf.Variable]:
    """Returns TensorFlow's variables, of which Keras 3's are wrappers."""
    return [own if isinstance(own, tf.Variable) else own.value for own in variables]


def name_of(variable: Any) -> str:
    """Returns a weight's name, ``layer/weight``."""
    return getattr(variable, "path", variable.name).partition(":")[0]


def layers_in(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """Returns a layer or model, and all layers inside, at any depth."""
    return list(dict.fromkeys(layer._flatten_layers()))
