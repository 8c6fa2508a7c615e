"""The user's own networks: functions, also by name as ``module:function``, and Keras models."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import pathlib
import sys
import traceback
from collections.abc import Callable
from typing import Any, Union

import keras
import numpy as np
import tensorflow as tf

from imagenet_fast.base.errors import UserError, first_line, nearest
from imagenet_fast.base.keras_2 import KERAS_3_16, NOT_TRAINING, layers_in, tensorflow_variables
from imagenet_fast.base.keras_check import is_tf_keras
from imagenet_fast.base.notices import warn_once
from imagenet_fast.layers import BatchNormalization
from imagenet_fast.models.copying import copy_model
from imagenet_fast.models.graph import last_layer
from imagenet_fast.models.options import CUSTOM

# (height, width, channels) of one image; None: any.
ImageShape = tuple[Union[int, None], Union[int, None], int]
# A function (or class) from the number of classes and the image shape to a network, also by its
# name, module:function; or a functional or sequential model.
CustomModel = Union[Callable[[int, ImageShape], keras.Model], keras.Model, str]
BatchNorm = Callable[..., keras.layers.BatchNormalization]

# Operations that can follow a softmax without changing its values.
_PASS_ON = ("Identity", "Cast", "Reshape")
# The largest factor of a keras.layers.Rescaling that is for pixels in 0..255, not 0..1.
_SCALE_OF_BYTES = 1 / 100
# Of a function that makes a network.
_SIGNATURE = "build(num_classes, image_shape)"
# Of layers whose precision is not their own, but that of the script.
_POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")
_MAKE_OURS = "for speed, make them with imagenet_fast.layers.BatchNormalization"
_OTHER_KERAS = (
    ", of tf_keras: write `import keras` in place of `import tf_keras as keras`, and read a .keras "
    "file that tf_keras saved by imagenet_fast.models.load"
)


def name_of(model: CustomModel) -> str:
    """Returns the value of ``Config.model`` for a network given in Python.

    Returns:
        ``module:function`` if another process can import the function, else ``custom``; of a name,
        the name.
    """
    if isinstance(model, str):
        return model
    module, name = getattr(model, "__module__", None), getattr(model, "__qualname__", None)
    if not isinstance(model, keras.Model) and module and name and module != "__main__":
        with contextlib.suppress(KeyError, AttributeError):
            if functools.reduce(getattr, name.split("."), sys.modules[module]) is model:
                return f"{module}:{name}"
    return CUSTOM


def build_custom(
    name: str,
    model: CustomModel | None,
    num_classes: int,
    image_shape: ImageShape,
    batch_norm: BatchNorm | None = None,
) -> keras.Model:
    """Makes a network of the user, in the strategy's scope and under the precision policy.

    A model is copied with its weights. If the last layer's activation is softmax, it is left out:
    the network returns logits.

    Args:
        name: ``module:function``, or ``custom``.
        model: the function or model; None, or a name: the one that ``name`` names.
        num_classes: number of logits.
        image_shape: of the network's input, without the batch.
        batch_norm: makes the layers that replace Keras' batch norms, of the same configuration;
            None: they stay.

    Raises:
        UserError: if there is no such function, it fails, or the network does not return logits.
    """
    if model is None or isinstance(model, str):
        model = _load(name)
    described = f"model {name}" if name != CUSTOM else "model"
    if isinstance(model, keras.Model):
        last = last_layer(model)
        network = copy_model(model, image_shape, lambda own: _of_policy(own, last, batch_norm))
        if model.built:
            use_restored_statistics(network)
        if batch_norm is not None:
            _tell_of_batch_norms(described, len(keras_batch_norms(model)), network)
    else:
        network = _call(model, described, num_classes, image_shape)
        if batch_norm is not None:
            network = _with_batch_norms(network, described, image_shape, batch_norm)
    last = last_layer(network)
    if last is not None and getattr(last, "activation", None) is keras.activations.softmax:
        last.activation = keras.activations.linear
        warn_once(
            f"{described}: the softmax at its end is left out, because the loss takes logits; "
            "predictions and exported models have it"
        )
    _check_outputs(network, described, num_classes, image_shape)
    return network


def expects_bytes(network: keras.Model) -> bool:
    """Returns whether a network has a layer that scales pixels in 0..255 down."""
    return any(
        isinstance(layer, keras.layers.Rescaling) and np.max(np.abs(layer.scale)) <= _SCALE_OF_BYTES
        for layer in layers_in(network)
    )


def needed_arguments(network: keras.Model) -> dict[str, Any]:
    """Returns what a symbolic call of a network needs beside its inputs: ``training``, or nothing.

    Raises:
        UserError: if Keras would then never train the network: from 3.16 on, a graph of layers
            keeps the value of such a call.
    """
    parameter = inspect.signature(network.call).parameters.get("training")
    if not NOT_TRAINING or parameter is None or parameter.default is not parameter.empty:
        return {}
    if KERAS_3_16:
        raise UserError(
            f"the call of model {network.name} needs training, which Keras {keras.__version__} "
            "gives only to those with a default: call(self, images, training=False)"
        )
    return NOT_TRAINING


def keras_batch_norms(network: keras.Model) -> list[keras.layers.BatchNormalization]:
    """Returns a network's batch norms that are not this package's."""
    norms = [own for own in layers_in(network) if isinstance(own, keras.layers.BatchNormalization)]
    return [norm for norm in norms if not isinstance(norm, BatchNormalization)]


def set_batch_norms(network: keras.Model, name: str, value: float) -> None:
    """Gives all batch norms of a network a ``momentum`` or ``epsilon``, and tells which they had.

    Those in other layers, and of classes of their own, count.
    """
    norms = [own for own in layers_in(network) if isinstance(own, keras.layers.BatchNormalization)]
    before = sorted({getattr(norm, name) for norm in norms} - {value})
    if not before:
        return
    for norm in norms:
        setattr(norm, name, value)
    warn_once(
        f"model {network.name}: batch norms ({len(norms)}) get {name} {value:g}, as "
        f"batch_norm_{name} says, in place of {' and '.join(f'{own:g}' for own in before)}"
    )


def layers_in_float16(network: keras.Model) -> list[keras.layers.Layer]:
    """Returns the layers of a network that compute in float16, in which gradients underflow."""
    return [own for own in layers_in(network) if own.compute_dtype == "float16"]


def use_restored_statistics(network: keras.Model) -> None:
    """Makes ``keras.layers.Normalization`` use the mean and variance that its weights have.

    Keras reads these weights only when such a layer is built, adapted or loaded from a file.
    """
    for layer in layers_in(network):
        if isinstance(layer, keras.layers.Normalization):
            layer.finalize_state()


def _load(name: str) -> Any:
    """Imports ``module:function``; modules in the working directory come before all others."""
    if name == CUSTOM:
        raise UserError(
            "this run's model is code, which its configuration cannot name: give it again, in "
            "Python as model=, or on the command line as --model=MODULE:FUNCTION"
        )
    module_name, _, attributes = name.partition(":")
    here = str(pathlib.Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        hint = ""
        if module_name.endswith(".py"):
            hint = f"; did you mean {module_name.removesuffix('.py')}:{attributes}?"
        if missing and f"{module_name}.".startswith(f"{missing}."):
            raise UserError(
                f"model {name}: there is no module {missing} in {here} or on PYTHONPATH{hint}"
            ) from None
        raise UserError(
            f"model {name}: importing {module_name} failed: {_reason(error)}"
        ) from error
    file = getattr(found, "__file__", None)
    if file:
        warn_once(f"model {name}: of {file}")
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            raise UserError(
                f"model {name}: {module_name} has no {attributes}{nearest(attribute, dir(found))}"
            )
        found = getattr(found, attribute)
    return found


def _call(make: Any, described: str, num_classes: int, image_shape: ImageShape) -> keras.Model:
    contract = (
        "it must be a function of the number of classes and the shape of an image, such as "
        f"def {_SIGNATURE}"
    )
    if is_tf_keras(type(make)):
        raise UserError(f"{described} is a {_named(type(make))}{_OTHER_KERAS}")
    if not callable(make):
        raise UserError(f"{described} is {make!r}, but {contract}, or a Keras model")
    if f"{getattr(make, '__module__', '')}.".startswith("keras.src.applications."):
        raise UserError(
            f"{described} takes other arguments than the number of classes and the shape of an "
            f"image: give --model=keras:{make.__name__}, or a function that calls it, as "
            f"`def {_SIGNATURE}: return keras.applications.{make.__name__}(weights=None, "
            "classes=num_classes, input_shape=image_shape, classifier_activation=None)`"
        )
    try:
        inspect.signature(make).bind(num_classes, image_shape)
    except TypeError:
        raise UserError(f"{described}: {contract}, but takes {inspect.signature(make)}") from None
    except ValueError:  # a builtin without a signature
        pass
    try:
        network = make(num_classes, image_shape)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        sizes = " for images of any size, as with train_sizes, size_ramp or eval_image_size"
        where = sizes if None in image_shape else ""
        raise UserError(f"{described} failed{where}: {_reason(error)}") from error
    if not isinstance(network, keras.Model):
        kind = type(network)
        hint = _OTHER_KERAS if is_tf_keras(kind) else ", and not a Keras Model"
        raise UserError(f"{described} returned a {_named(kind)}{hint}")
    created_here = tf.distribute.get_strategy().extended.variable_created_in_scope
    if network.built and not all(map(created_here, tensorflow_variables(network.variables))):
        raise UserError(
            f"{described} returned a model that was made before it was called: make the model in "
            "the function, and load weights there"
        )
    return network


def _with_batch_norms(
    network: keras.Model, described: str, image_shape: ImageShape, batch_norm: BatchNorm
) -> keras.Model:
    """Returns a copy of a network with the package's batch norms, if it has others and can be."""
    own = keras_batch_norms(network)
    if not own:
        return network
    try:
        copy = copy_model(network, image_shape, lambda layer: _replaced(layer, batch_norm))
    except UserError as error:
        cause = error.__cause__
        reason = f" ({first_line(cause)})" if isinstance(cause, Exception) else ""
        warn_once(
            f"{described} keeps Keras' batch norms ({len(own)}), because Keras cannot copy it"
            f"{reason}: {_MAKE_OURS}"
        )
        return network
    if network.built:
        use_restored_statistics(copy)
    _tell_of_batch_norms(described, len(own), copy)
    return copy


def _tell_of_batch_norms(described: str, number: int, network: keras.Model) -> None:
    left = keras_batch_norms(network)
    if number > len(left):
        warn_once(
            f"{described}: batch norms ({number - len(left)}) became imagenet_fast.layers."
            "BatchNormalization, with the same weights and results; --fused_batch_norm=false "
            "leaves Keras'"
        )
    if left:
        warn_once(
            f"{described} keeps Keras' batch norms ({len(left)}, such as {left[0].name}) that are "
            f"of a class of their own or made by another layer ({_MAKE_OURS}), or come before tanh "
            "or sigmoid, with which TensorFlow cannot run this package's on CPUs"
        )


def _is_replaceable(layer: keras.layers.Layer) -> bool:
    """Returns whether a layer is a batch norm in whose place one of this package can be.

    On CPUs, TensorFlow (Grappler's remapper) makes one operation of a convolution, a fused batch
    norm and its activation, but cannot run that with tanh or sigmoid.
    """
    if type(layer) is not keras.layers.BatchNormalization:
        return False
    after = [getattr(node, "operation", None) or node.layer for node in layer._outbound_nodes]
    functions = [getattr(own, "activation", None) for own in after]
    names = {getattr(function, "__name__", "") for function in functions}
    return not {"tanh", "sigmoid"} & {*names, *(type(own).__name__.lower() for own in after)}


def _replaced(layer: keras.layers.Layer, batch_norm: BatchNorm) -> keras.layers.Layer:
    if _is_replaceable(layer):
        return batch_norm(**layer.get_config())
    return type(layer).from_config(layer.get_config())


def _of_policy(
    layer: keras.layers.Layer, last: keras.layers.Layer | None, batch_norm: BatchNorm | None
) -> keras.layers.Layer:
    """Returns a copy of a layer that has the precision policy in scope, but for the last one."""
    config = layer.get_config()
    # Keras 3's operations, such as those of x + y, have no weights and no precision.
    if isinstance(layer, keras.layers.Layer) and layer.dtype_policy.name in _POLICIES:
        config.pop("dtype", None)
    if layer is last:
        config["dtype"] = "float32"
    if batch_norm is not None and _is_replaceable(layer):
        return batch_norm(**config)
    return type(layer).from_config(config)


def _check_outputs(
    network: keras.Model, described: str, num_classes: int, image_shape: ImageShape
) -> None:
    """Builds a network, and checks that it takes images and returns logits."""
    try:
        if not network.built:
            network(keras.Input(image_shape), **NOT_TRAINING)
        traced = tf.function(lambda images: network(images, training=False), autograph=False)
        concrete = traced.get_concrete_function(tf.TensorSpec((None, *image_shape)))
        graph = concrete.graph
    except UserError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise UserError(
            f"{described} cannot take images of shape {image_shape}: {_reason(error)}"
        ) from error
    shapes = [tuple(output.shape) for output in graph.outputs]
    structure = concrete.structured_outputs
    if shapes != [(None, num_classes)] or not tf.is_tensor(structure):
        kind = "" if tf.is_tensor(structure) else f"a {type(structure).__name__} of "
        raise UserError(
            f"{described} returns {kind}{', '.join(map(str, shapes))}, but must return a logit for "
            f"each of the {num_classes} classes, {(None, num_classes)}"
        )
    operation = graph.outputs[0].op
    while operation.type in _PASS_ON:
        operation = operation.inputs[0].op
    if operation.type == "Softmax":
        raise UserError(
            f"{described} returns probabilities, but must return logits: leave out the softmax at "
            "its end; predictions and exported models have it"
        )
    if operation.type == "Sigmoid":
        warn_once(
            f"{described} ends in a sigmoid, whose outputs the loss takes as logits: leave it "
            "out, unless that is intended"
        )


def _named(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _reason(error: BaseException) -> str:
    """Returns an error's type, message and place in the user's code."""
    libraries = (str(pathlib.Path(tf.__file__).parents[1]), __file__, "<frozen")
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not frame.filename.startswith(libraries)]
    place = f" ({users[-1].filename}, line {users[-1].lineno})" if users else ""
    reason = first_line(error)
    if reason.startswith("Exception encountered when calling"):  # a heading of Keras
        reason = first_line(Exception(str(error).partition("\n")[2]))
    return f"{type(error).__name__}: {reason}{place}"
