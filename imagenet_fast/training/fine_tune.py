"""Fine-tuning: pretrained weights and frozen layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import tensorflow as tf
import tf_keras as keras

from imagenet_fast.base.errors import UserError, nearest
from imagenet_fast.base.paths import Path, to_path
from imagenet_fast.config import Config
from imagenet_fast.distribute.one_call import assign_everywhere
from imagenet_fast.layers import Dropout
from imagenet_fast.models import network_of
from imagenet_fast.models.keras_applications import load_keras_applications_weights
from imagenet_fast.training.checkpoint import restore_weights
from imagenet_fast.training.classifier import Classifier
from imagenet_fast.training.model_dir import CONFIG_FILE, read_config, read_labels

# Weights by layer and by name in it.
Weights = Mapping[str, Mapping[str, np.ndarray]]

# Pixel mean of Keras applications' pretrained networks: red, green, blue.
_KERAS_MEAN = (123.68, 116.779, 103.939)


def freeze(network: keras.Model, through: str) -> None:
    """Excludes a network's first layers from training; their batch norms keep their averages.

    Args:
      network: functional, as ``models.build`` makes it.
      through: the last layers to freeze: the name of a layer, or how the names of a part of the
        network begin (``stage2`` for ``stage2_block1_conv1`` and so on).

    Raises:
      UserError: if there are no such layers, or none is left to train.
    """
    names = [layer.name for layer in network.layers]
    named = [i for i, name in enumerate(names) if f"{name}_".startswith(f"{through}_")]
    if not named:
        before_logits = names[1 : names.index("logits")]
        parts = list(dict.fromkeys(name.split("_")[0] for name in before_logits))
        raise UserError(
            f"freeze_through={through}: {network.name} has no such layers"
            f"{nearest(through, parts)}; its parts are {', '.join(parts)}"
        )
    for layer in network.layers[: named[-1] + 1]:
        layer.trainable = False
    if not network.trainable_variables:
        raise UserError(f"freeze_through={through} leaves nothing of {network.name} to train")


def load_initial_weights(
    model: Classifier, rebuild: Callable[[Config, Sequence[str]], Classifier]
) -> str:
    """Sets a model's weights to those that its configuration's ``initial_weights`` names.

    The classification head stays new unless the classes are known to be the same. To be called
    outside the strategy's scope, so that the loaded weights are not copied to each device.

    Args:
      model: as ``build_classifier`` makes it.
      rebuild: builds a model from a configuration and class names.

    Returns:
      A sentence that says where the weights are from and which of them are new.

    Raises:
      UserError: if there are no weights, or they are not this network's, which is then unchanged.
    """
    config, network = model.config, network_of(model)
    assert config is not None
    path = to_path(config.initial_weights)
    kept = False
    if path.is_file():
        _set_from_keras(network, config, path)
    else:
        if (path / "saved_model.pb").is_file():
            weights, labels = _of_export(path)
        elif (path / CONFIG_FILE).is_file():
            weights, labels = _of_run(path, rebuild)
        else:
            raise UserError(
                f"initial_weights: {path} is neither the model_dir of a run, nor a SavedModel that "
                "`export` wrote, nor a file of Keras applications' weights (.h5)"
            )
        kept = labels == model.labels
        _set(network, weights, path, with_head=kept)
    model.restart_copies()
    head = "with" if kept else "but for"
    return f"weights begin as those of {path}, {head} the last layer, logits"


def _of_run(
    path: Path, rebuild: Callable[[Config, Sequence[str]], Classifier]
) -> tuple[Weights, tuple[str, ...]]:
    """Returns the weights of a run's last checkpoint, averaged if it does so, and its classes."""
    model = rebuild(read_config(str(path)).on_one_device(), read_labels(str(path)))
    restore_weights(model, str(path))
    with model.averaged_weights():
        return _by_layer(network_of(model).variables), model.labels


def _of_export(path: Path) -> tuple[Weights, tuple[str, ...]]:
    """Returns the weights of a SavedModel, and its classes."""
    try:
        module = tf.saved_model.load(str(path))
        labels = tuple(label.decode() for label in module.labels().numpy())
        return _by_layer(module.signatures["serving_default"].variables), labels
    except (OSError, AttributeError, KeyError, tf.errors.OpError) as error:
        raise UserError(
            f"initial_weights: {path} is not a SavedModel that `export` wrote: {error}"
        ) from error


def _by_layer(variables: Iterable[tf.Variable]) -> Weights:
    weights: dict[str, dict[str, np.ndarray]] = {}
    for variable in variables:
        if variable.dtype.is_floating:  # What dropout keeps is for its random numbers.
            layer, role = _place(variable)
            weights.setdefault(layer, {})[role] = variable.numpy()
    return weights


def _place(variable: tf.Variable) -> tuple[str, str]:
    """Returns the layer and the role in it of ``stem_conv/kernel:0``."""
    layer, role = variable.name.split(":")[0].split("/")[-2:]
    return layer, role


def _set(network: keras.Model, weights: Weights, path: Path, *, with_head: bool) -> None:
    layers = [layer for layer in network.layers if layer.weights and not isinstance(layer, Dropout)]
    own = {_place(variable)[0] for layer in layers for variable in layer.weights}
    others = [layer for layer in weights if layer not in own]
    if others:
        raise UserError(
            f"initial_weights: {path} holds another network than {network.name}: it has "
            f"{others[0]}, which {network.name} has not"
        )
    if not with_head:
        layers.remove(network.get_layer("logits"))
    variables, values = [], []
    for variable in (variable for layer in layers for variable in layer.weights):
        layer, role = _place(variable)
        value = weights.get(layer, {}).get(role)
        if value is None or value.shape != variable.shape:
            there = "does not exist" if value is None else f"is {value.shape}"
            raise UserError(
                f"initial_weights: {path} holds another network than {network.name}: {role} of "
                f"{layer} {there} there, and is {tuple(variable.shape)} here"
            )
        variables.append(variable)
        values.append(value)
    assign_everywhere(variables, values)


def _set_from_keras(network: keras.Model, config: Config, path: Path) -> None:
    """Sets the weights of Keras applications, but those of the last layer.

    They expect colours in the order blue, green, red, and not divided by a standard deviation.
    """
    if not np.allclose(config.pixel_mean, _KERAS_MEAN, rtol=0, atol=1e-3):
        raise UserError(
            "the weights of Keras applications were trained with another mean of colours: give "
            f"--pixel_mean={','.join(map(str, _KERAS_MEAN))}"
        )
    load_keras_applications_weights(network, path, include_top=False)
    kernel = next(layer for layer in network.layers if layer.weights).weights[0]
    value = kernel.numpy()[:, :, ::-1] * np.reshape(config.pixel_std, [3, 1])
    assign_everywhere([kernel], [value])
