"""Converts the weights of Keras applications' ResNets to the models of this package."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

import keras
import numpy as np

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.outside import read_bounded
from imagenet_fast.base.paths import Path, to_path
from imagenet_fast.distribute.one_call import assign_everywhere
from imagenet_fast.layers import BlurPool
from imagenet_fast.models.hdf5 import read_hdf5

# batch_norm_epsilon of Keras applications' networks.
_EPSILON = 1.001e-5
# A ResNet-152 with its optimizer's state has 0.7 GB.
_LARGEST_FILE = 2**30
# The classifier's names in Keras' code and in its weight files.
_TOPS = ("predictions", "probs")


def load_keras_applications_weights(
    model: keras.Model, weights: keras.Model | str | os.PathLike[str], *, include_top: bool = True
) -> None:
    """Sets the weights of a ResNet-50, 101 or 152 to those of Keras applications.

    The model must be Keras applications' network: ``resnet(depth, stride_on_1x1=True,
    batch_norm_epsilon=1.001e-5)`` with the ImageNet stem. Its logits are then the same. Keras'
    convolutions have biases, this package's do not: they are subtracted from the moving means of
    the following batch norms, which is exactly equivalent in inference.

    Keras' weights were trained with its "caffe" preprocessing: channels in the order blue, green,
    red, in 0..255, minus (103.939, 116.779, 123.68).

    Args:
        model: the model to change, made by ``imagenet_fast.models.resnet.resnet``.
        weights: a model of ``keras.applications``, or the path of its weights in HDF5 format
            (.h5), as downloaded by Keras or written by its ``save``.
        include_top: whether to set the classifier too.

    Raises:
        UserError: if the file cannot be read, or the weights do not fit the model; the message
            lists what differs, and the model is unchanged.
    """
    _check_variant(model)
    source = _of_model(weights) if isinstance(weights, keras.Model) else _of_file(to_path(weights))
    tops = [name for name in _TOPS if name in source]
    if include_top and not tops:
        raise UserError("the weights have no classifier; use include_top=False to keep the model's")

    values = {}
    missing = []
    unused = {name for name in source if name.startswith("conv")}
    for layer in model.layers:
        if not layer.weights or (layer.name == "logits" and not include_top):
            continue
        name = tops[0] if layer.name == "logits" else _their_name(layer.name)
        unused.discard(name)
        if name not in source:
            missing.append(name)
        elif isinstance(layer, keras.layers.BatchNormalization):
            conv = source.get(re.sub("bn$", "conv", name), {})
            values[layer] = _batch_norm_values(source[name], conv)
        else:
            roles = ("kernel", "bias") if layer.use_bias else ("kernel",)
            values[layer] = [source[name].get(role) for role in roles]
    if missing or unused:
        lacking = f"the weights lack {_first(missing)}" if missing else ""
        beyond = f"the model lacks {_first(sorted(unused))}" if unused else ""
        raise UserError(
            f"the weights are not of {model.name}: {'; '.join(filter(None, (lacking, beyond)))}; "
            "build the model with their depth"
        )
    _check_shapes(values)
    variables = [variable for layer in values for variable in layer.weights]
    assign_everywhere(variables, [array for arrays in values.values() for array in arrays])


def _check_variant(model: keras.Model) -> None:
    layers = {layer.name: layer for layer in model.layers}
    if any(isinstance(layer, BlurPool) for layer in layers.values()):
        raise UserError(
            f"{model.name} blurs before subsampling and Keras applications does not; build it with "
            'blur_pool="none"'
        )
    first = layers.get("stage2_block1_conv1")
    if first is None or "stage1_block1_conv3" not in layers:
        raise UserError(
            f"Keras applications has no weights for {model.name}, only for models made by "
            "resnet(50), resnet(101) and resnet(152)"
        )
    if first.strides == (1, 1):
        raise UserError(
            f"{model.name} has its strides on the 3x3 convolutions and Keras applications on the "
            "1x1; build it with stride_on_1x1=True"
        )
    if "stem_pool" in layers and "stem_pool_pad" not in layers:
        raise UserError(
            f"{model.name} pads its pool at the bottom and right and Keras applications on all "
            'sides; build it with padding="symmetric"'
        )
    epsilon = layers["stem_bn"].epsilon
    if not np.isclose(epsilon, _EPSILON, rtol=1e-6, atol=0):
        raise UserError(
            f"{model.name} has batch_norm_epsilon={epsilon:g} and Keras applications {_EPSILON}; "
            f"build it with batch_norm_epsilon={_EPSILON}"
        )


def _their_name(name: str) -> str:
    """Returns Keras applications' name of a layer of this package.

    Raises:
        UserError: if it has no such layer.
    """
    if name.startswith("stem_"):
        return name.replace("stem", "conv1")
    match = re.fullmatch(r"stage(\d+)_(block\d+)_(?:projection_)?(conv|bn)(\d*)", name)
    if not match:
        raise UserError(f"Keras applications has no weights for the layer {name}")
    stage, block, kind, number = match.groups()
    # In Keras the stem is stage 1, and the projection number 0.
    return f"conv{int(stage) + 1}_{block}_{number or 0}_{kind}"


def _of_model(model: keras.Model) -> dict[str, dict[str, np.ndarray]]:
    """Returns the arrays of a model by layer and role."""
    return {
        layer.name: {_role(weight.name): weight.numpy() for weight in layer.weights}
        for layer in model.layers
        if layer.weights
    }


def _of_file(path: Path) -> dict[str, dict[str, np.ndarray]]:
    """Returns the arrays of a Keras HDF5 file by layer and role."""
    if not path.is_file():
        raise UserError(f"there is no weight file {path}")
    try:
        content = read_hdf5(read_bounded(path, _LARGEST_FILE))
        # ``save`` puts the weights in a group, ``save_weights`` at the root.
        root = "model_weights/" if "model_weights" in content.groups else ""
        layers: dict[str, dict[str, np.ndarray]] = {}
        for name, values in content.arrays.items():
            layer, _, variable = name.removeprefix(root).partition("/")
            if name.startswith(root) and "/" in variable:
                layers.setdefault(layer, {})[_role(variable)] = values
        if not layers:
            raise ValueError("it has no layers")
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read as weights in Keras' HDF5 format (.h5): {error}"
        ) from error
    return layers


def _role(name: str) -> str:
    """Returns the last part of a variable's name: "kernel" of "conv1_conv/kernel:0"."""
    return name.rsplit("/", maxsplit=1)[-1].split(":")[0]


def _batch_norm_values(
    source: Mapping[str, np.ndarray], conv: Mapping[str, np.ndarray]
) -> list[np.ndarray | None]:
    """Returns gamma, beta, mean and variance of a batch norm, with ``conv``'s bias folded in."""
    gamma, beta, mean, variance = (
        source.get(role) for role in ("gamma", "beta", "moving_mean", "moving_variance")
    )
    if mean is not None and "bias" in conv:
        mean = mean - conv["bias"]
    return [gamma, beta, mean, variance]


def _check_shapes(values: Mapping[keras.layers.Layer, list[np.ndarray | None]]) -> None:
    wrong = {}
    for layer, arrays in values.items():
        for variable, array in zip(layer.weights, arrays):
            shape = None if array is None else array.shape
            if shape != tuple(variable.shape):
                wrong[f"{layer.name}/{_role(variable.name)}"] = (shape, tuple(variable.shape))
    if wrong:
        differences = [f"{name} is {ours}, not {theirs}" for name, (theirs, ours) in wrong.items()]
        hint = ""
        if all(name.startswith("logits") for name in wrong):
            hint = "; use include_top=False to keep the model's classifier"
        raise UserError(f"the model does not have the weights' shapes: {_first(differences)}{hint}")


def _first(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
