"""Fine-tuning: pretrained weights and frozen layers."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from imagenet_fast import models
from imagenet_fast.base.errors import UserError, nearest
from imagenet_fast.base.keras_2 import name_of
from imagenet_fast.base.notices import warn_once
from imagenet_fast.base.option import option_text
from imagenet_fast.base.paths import Path, to_path
from imagenet_fast.config import Config
from imagenet_fast.data.options import DataOptions
from imagenet_fast.distribute.one_call import assign_everywhere
from imagenet_fast.layers import Dropout
from imagenet_fast.models import load, network_of
from imagenet_fast.models.applications import application_weights, corrected_variance
from imagenet_fast.models.custom import use_restored_statistics
from imagenet_fast.models.depth import blocks_of, name_of_block
from imagenet_fast.models.keras_applications import load_keras_applications_weights
from imagenet_fast.models.keras_hub import PRESET_WEIGHTS, preset_weights
from imagenet_fast.models.libraries import pretrained_weights
from imagenet_fast.models.options import is_custom, library_of
from imagenet_fast.training.build.saved_model import read_saved_model
from imagenet_fast.training.checkpoints.checkpoint import restore_weights
from imagenet_fast.training.checkpoints.config_file import CONFIG_FILE, stored_config
from imagenet_fast.training.checkpoints.model_dir import checkpoint_of, read_labels
from imagenet_fast.training.checkpoints.sizes import no_larger_than
from imagenet_fast.training.step.classifier import Classifier

# Weights by layer name and weight name.
Weights = Mapping[str, Mapping[str, np.ndarray]]
# Weights by their full names, in the order of a network's.
NamedArrays = Sequence[tuple[str, np.ndarray]]

# Pixel mean of Keras applications' pretrained networks: red, green, blue.
_KERAS_MEAN = (123.68, 116.779, 103.939)
# Options of networks that change neither the number nor the shapes of weights.
_UNSEEN_IN_WEIGHTS = (
    *("blur_pool", "padding", "stride_on_1x1", "pool_order", "activation", "celu_alpha"),
    "logits_scale",
)
# Bytes of a head for many classes, which a network for others does not have.
_MOST_BEYOND_NETWORK = 2**30
ALL_BUT_HEAD = "all_but_head"
# Where layers' names begin with fewer words, as in ConvNeXt, messages have those of blocks.
_LEAST_PARTS = 3
_SOURCES_OF_LIBRARIES = (
    "the model_dir of a run with this network, a preset folder of KerasHub, a .keras file that "
    "`model.save` wrote or, for keras:NAME, a .weights.h5 file that `model.save_weights` wrote; "
    "what Keras published goes into its cache, for --pretrained"
)
# Of classification heads of libraries, which those who fine-tune may have replaced.
_OF_HEAD = re.compile(r"(^|/)(logits|predictions|pre_logits)/[^/]+$")
_SOURCES = (
    "the model_dir of a trained run, a SavedModel that `export` or tf_keras wrote, a .keras file "
    "that `model.save` wrote, or a file of Keras applications' weights (.h5)"
)


def freeze(network: keras.Model, through: str) -> None:
    """Freezes a network's first layers, with the moving averages of their batch norm.

    Args:
      network: functional, from ``models.build`` or of a library.
      through: the last layers to freeze: a layer's name, or the prefix of a part's layers
        (``stage2`` for ``stage2_block1_conv1`` and so on); a number of ``blocks_of``; or
        ``all_but_head``.

    Raises:
      UserError: if there are no such layers, or none is left to train.
    """
    frozen = _through(network.layers, through)
    blocks = [] if frozen else blocks_of(network)
    if through == ALL_BUT_HEAD or through.isdecimal():
        count = len(blocks) - 1 if through == ALL_BUT_HEAD else int(through)
        frozen = list(itertools.chain(*blocks[:count]))
    elif not frozen:  # in a network of a library, they may be in its backbone
        frozen = _through(list(itertools.chain(*blocks)), through)
    if not frozen:
        names = [name_of_block(block) for block in blocks[:-1]]
        parts = list(dict.fromkeys(name.split("_")[0] for name in names))
        parts = names if len(parts) < _LEAST_PARTS else parts
        raise UserError(
            f"freeze_through={through}: {network.name} has no such layers"
            f"{nearest(through, parts)}; its parts are {', '.join(parts)}"
        )
    for layer in frozen:
        layer.trainable = False
    if not network.trainable_variables:
        raise UserError(f"freeze_through={through} leaves nothing of {network.name} to train")


def _through(layers: Sequence[keras.layers.Layer], through: str) -> list[keras.layers.Layer]:
    """Returns the layers through the last whose name is, or begins with, this; none: no layer's."""
    matching = [i for i, own in enumerate(layers) if f"{own.name}_".startswith(f"{through}_")]
    return list(layers[: matching[-1] + 1]) if matching else []


def load_initial_weights(
    model: Classifier, rebuild: Callable[[Config, Sequence[str]], Classifier]
) -> str:
    """Loads the weights that the configuration's ``initial_weights`` names into a model.

    The classification head stays new unless the classes are the same. To be called outside the
    strategy's scope, so that the loaded weights are not copied to each device.

    Returns:
      A sentence with the weights' source that says whether the head is new.

    Raises:
      UserError: if there are no weights, or they are another network's; the model is unchanged.
    """
    config, network = model.config, network_of(model)
    assert config is not None
    if library_of(config.model):
        source, has_head = _load_of_library(model, rebuild)
        model.restart_shadow_weights()
        head = "including" if has_head else "except"
        return f"initial weights: those of {source}, {head} the classification head"
    path = to_path(config.initial_weights)
    labels: tuple[str, ...] = ()  # which files of Keras do not have
    if path.is_file() and path.suffix != ".keras":
        _set_from_keras(network, config, path)
    else:
        if path.is_file():
            weights = _by_layer(_named(load(path).variables))
        elif (path / "saved_model.pb").is_file():
            weights, labels = _read_export(path, network)
        elif (path / CONFIG_FILE).is_file():
            run = run_in(path, "initial_weights")
            _warn_of_another_network(config, run)
            arrays, labels = read_run(run, rebuild)
            weights = _by_layer(arrays)
        elif path.exists():
            raise UserError(f"initial_weights: {path} is neither {_SOURCES}")
        else:
            raise UserError(
                f"initial_weights: {path} does not exist: train that run first, or give {_SOURCES}"
            )
        _set(network, weights, path, with_head=labels == model.labels)
    model.restart_shadow_weights()
    head = "including" if labels == model.labels else "except"
    return f"initial weights: those of {path}, {head} the classification head (logits)"


def _load_of_library(
    model: Classifier, rebuild: Callable[[Config, Sequence[str]], Classifier]
) -> tuple[str, bool]:
    """Loads a network of a library; returns the source, and whether it has the head, too."""
    config, network = model.config, network_of(model)
    assert config is not None
    if config.pretrained:
        arrays = _named(pretrained_weights(config.model))
        _set_in_order(network, arrays, config.model, headless=True)
        return f"{config.model}, pretrained", False
    path = to_path(config.initial_weights)
    if not path.exists():
        raise UserError(f"initial_weights: {path} does not exist: give {_SOURCES_OF_LIBRARIES}")
    labels: tuple[str, ...] = ()
    headless = False
    if (path / PRESET_WEIGHTS).is_file():
        arrays, headless = _named(preset_weights(path)), True
    elif (path / CONFIG_FILE).is_file():
        arrays, labels = read_run(run_in(path, "initial_weights"), rebuild)
    elif path.suffix == ".keras":
        arrays = _named(load(path).weights)
    elif path.name.endswith(".weights.h5") and config.model.startswith("keras:"):
        arrays = _named(application_weights(config.model.partition(":")[2], path))
        headless = True
    else:
        raise UserError(f"initial_weights: {path} is not {_SOURCES_OF_LIBRARIES}")
    _set_in_order(network, arrays, path, headless=headless, with_head=labels == model.labels)
    return str(path), labels == model.labels


def _set_in_order(
    network: keras.Model,
    source: NamedArrays,
    name: object,
    *,
    headless: bool = False,
    with_head: bool = False,
) -> None:
    """Sets a network's weights to others in the same order, which may end before the head.

    Names would not do: Keras numbers layers that have none, and those inside of others recur.

    A ``headless`` source is all of the network but its head. The last layer is set only
    ``with_head``.
    """
    head = models.head(network)
    last = {id(variable) for variable in head.weights} if head and not with_head else set()
    variables: list[tf.Variable] = []
    values: list[np.ndarray] = []
    others = itertools.chain(source, itertools.repeat(("nothing", np.zeros(()))))
    for variable, (full_name, value) in zip(filter(is_floating, network.weights), others):
        if id(variable) in last or (headless and len(values) == len(source)):
            break
        own, shape = name_of(variable), tuple(variable.shape)
        role = _role(own)
        if (_role(full_name), value.shape) != (role, shape):
            if _OF_HEAD.search(own):  # files may have another one
                break
            raise UserError(
                f"initial_weights: {name} holds another network than {network.name}: in place of "
                f"{own} of {shape} it has {full_name} of {value.shape}"
            )
        variables.append(variable)
        values.append(corrected_variance(value) if role == "variance" else value)
    assign_everywhere(variables, values)
    use_restored_statistics(network)


def _role(name: str) -> str:
    """Returns ``kernel`` of ``layer/kernel``, and ``variable`` of ``layer/variable_3``."""
    return re.sub(r"_\d+$", "", name.rpartition("/")[2])


def run_in(path: Path, option: str) -> Config:
    """Returns the configuration of a run whose network is no code.

    Args:
      path: its directory.
      option: that names it.

    Raises:
      UserError: if there is none, or its network is code.
    """
    run = stored_config(str(path))
    if is_custom(run.model):
        raise UserError(
            f"{option}: the network of the run in {path} is code, {run.model}, which no file may "
            "name"
            + ": load its weights in the function that makes your network"
            * (option == "initial_weights")
        )
    return run.replace(pretrained=False, freeze_through="")


def _warn_of_another_network(config: Config, run: Config) -> None:
    """Warns if this network computes something else with a run's weights than the run's does."""
    names = [name for name in config.differences(run) if name in _UNSEEN_IN_WEIGHTS]
    if names and config.model == run.model:
        flags = " ".join(f"--{name}={option_text(getattr(run, name))}" for name in names)
        warn_once(
            f"initial_weights: the network of {run.model_dir} has the same weights, but computes "
            f"something else with them: for the same network give {flags}"
        )


def read_run(
    run: Config, rebuild: Callable[[Config, Sequence[str]], Classifier]
) -> tuple[NamedArrays, tuple[str, ...]]:
    """Returns the (moving-average) weights of a run's last checkpoint, and its classes."""
    with no_larger_than(checkpoint_of(run.model_dir)):
        model = rebuild(run.on_one_device(), read_labels(run.model_dir))
    restore_weights(model, run.model_dir)
    with model.averaged_weights():
        return _named(network_of(model).weights), model.labels


def _read_export(path: Path, network: keras.Model) -> tuple[Weights, tuple[str, ...]]:
    """Returns the weights of a SavedModel, and its classes."""
    here = sum(math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in network.variables)
    try:
        variables, labels = read_saved_model(path, here + _MOST_BEYOND_NETWORK)
    except (OSError, ValueError, tf.errors.OpError) as error:
        raise UserError(
            f"initial_weights: {path} is not a SavedModel that `export` or tf_keras wrote: {error}"
        ) from error
    return _by_layer(variables.items()), labels


def _named(variables: Iterable[tf.Variable]) -> NamedArrays:
    """Returns the names and values of weights, without states of random layers and counts."""
    return [(name_of(own), own.numpy()) for own in variables if is_floating(own)]


def is_floating(variable: tf.Variable) -> bool:
    """Returns whether a variable is a weight, not a state or a count."""
    return tf.as_dtype(variable.dtype).is_floating


def _by_layer(arrays: Iterable[tuple[str, np.ndarray]]) -> Weights:
    weights: dict[str, dict[str, np.ndarray]] = {}
    for full_name, value in arrays:
        layer, name = _layer_and_name(full_name)
        weights.setdefault(layer, {})[name] = value
    return weights


def _layer_and_name(variable: str) -> tuple[str, str]:
    """Returns ``stem_conv`` and ``kernel`` of ``stem_conv/kernel``."""
    path, _, name = variable.rpartition("/")
    return path.rpartition("/")[2], name


def _set(network: keras.Model, weights: Weights, path: Path, *, with_head: bool) -> None:
    layers = [layer for layer in network.layers if layer.weights and not isinstance(layer, Dropout)]
    names = {_layer_and_name(name_of(weight))[0] for layer in layers for weight in layer.weights}
    unknown = [layer for layer in weights if layer not in names]
    if unknown:
        raise UserError(
            f"initial_weights: {path} holds another network than {network.name}: it has "
            f"{unknown[0]}, which {network.name} has not"
        )
    if not with_head:
        layers.remove(network.get_layer("logits"))
    variables, values = [], []
    for variable in (variable for layer in layers for variable in layer.weights):
        layer, name = _layer_and_name(name_of(variable))
        value = weights.get(layer, {}).get(name)
        if value is None or value.shape != tuple(variable.shape):
            there = "does not exist" if value is None else f"is {value.shape}"
            raise UserError(
                f"initial_weights: {path} holds another network than {network.name}: {name} of "
                f"{layer} {there} there, and is {tuple(variable.shape)} here"
            )
        variables.append(variable)
        values.append(value)
    assign_everywhere(variables, values)


def _set_from_keras(network: keras.Model, options: DataOptions, path: Path) -> None:
    """Sets the weights of Keras applications, except those of the classification head.

    They expect channels in the order blue, green, red, not divided by a standard deviation.
    """
    if not np.allclose(options.pixel_mean, _KERAS_MEAN, rtol=0, atol=1e-3):
        raise UserError(
            "the weights of Keras applications were trained with another pixel mean: give "
            f"--pixel_mean={','.join(map(str, _KERAS_MEAN))}"
        )
    load_keras_applications_weights(network, path, include_top=False)
    kernel = next(layer for layer in network.layers if layer.weights).weights[0]
    value = kernel.numpy()[:, :, ::-1] * np.reshape(options.pixel_std, [3, 1])
    assign_everywhere([kernel], [value])
