"""Image classifiers: Keras models from normalized images to float32 logits.

``build`` makes a model by name, ``load`` reads a saved one; ``MODELS`` is the table of names. Its
functions ``resnet.resnet``, ``resnet.cifar_resnet``, ``alexnet.alexnet_bn``, ``resnet9.resnet9``,
``airbench.airbench`` and ``amoebanet.amoebanet`` return what ``build`` does, and can be called
directly. The last layer with weights of each model is a dense layer named ``logits``; ``features``
returns its inputs. ``custom`` has the user's own networks.

TensorFlow is imported when the table is first read: flags are checked against
``options.MODEL_NAMES`` without it. If Keras has been imported, the table is read at once, for Keras
to find the models' layers by name when it loads a model.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from typing import TYPE_CHECKING, Any

from imagenet_fast.base.errors import UserError, nearest
from imagenet_fast.models.options import MODEL_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable

    import keras

    MODELS: dict[str, Callable[..., keras.Model]]

__all__ = [
    "MODELS",
    "MODEL_NAMES",
    "build",
    "features",
    "head",
    "load",
    "network_of",
    "option_names",
]


def build(
    name: str,
    /,
    num_classes: int,
    input_shape: tuple[int | None, int | None, int],
    **options: Any,
) -> keras.Model:
    """Makes a model by name, uncompiled, under the global mixed-precision policy.

    Args:
        name: one of ``MODEL_NAMES``; positional only, because ``name=`` is an option of models.
        num_classes: number of logits.
        input_shape: (height, width, channels) of one image.
        **options: keyword arguments of the model's function.

    Returns:
        A functional model from float images [batch, height, width, channels], normalized, to
        float32 logits [batch, num_classes].

    Raises:
        UserError: if there is no such model, the model has no such option, or it cannot be made
            for these sizes.
    """
    models = _models()
    if name not in models:
        raise UserError(
            f"there is no model {name!r}{nearest(name, models)}; the models are {', '.join(models)}"
        )
    accepted = _options(models[name])
    for option in options:
        if option not in accepted:
            others = [other for other in models if option in _options(models[other])]
            raise UserError(
                f"model {name!r} has no option {option!r}"
                + (
                    f"; the models that have it are {', '.join(others)}"
                    if others
                    else f"{nearest(option, accepted)}; its options are {', '.join(accepted)}"
                )
            )
    return models[name](num_classes, input_shape, **options)


def load(path: str | os.PathLike[str]) -> keras.Model:
    """Reads a model from a ``.keras`` file, uncompiled.

    The file may be anyone's: it is read as data. Its layers must be Keras' layers that compute and
    nothing else, or be registered with Keras in this process, as those of this package are; a
    ``Lambda``, and other ways to name any function, are refused, and so are HDF5 files and
    SavedModels. ``keras.models.load_model`` reads those, but runs what the file holds.

    Raises:
        UserError: if it cannot be read.
    """
    import imagenet_fast.layers  # noqa: F401
    from imagenet_fast.base.paths import to_path
    from imagenet_fast.models.keras_file import load_keras_file

    _models()
    return load_keras_file(to_path(path))


def head(network: keras.Model) -> keras.layers.Dense | None:
    """Returns the dense layer from features to logits, or None if a network has no such layer.

    It is the layer named ``logits`` or, of other functional networks, the last one; networks with a
    ``call`` of their own have none.
    """
    import keras

    from imagenet_fast.models.graph import computes_its_graph, last_layer

    if not computes_its_graph(network):
        return None
    last = last_layer(network)
    layer = next((layer for layer in network.layers if layer.name == "logits"), last)
    return layer if isinstance(layer, keras.layers.Dense) else None


def features(network: keras.Model) -> Any:
    """Returns the inputs of the ``logits`` layer of a model that ``build`` made.

    Returns:
        A symbolic Keras tensor, float [batch, channels], an output for a new ``keras.Model``: in
        ResNets and AmoebaNets the global average pool, in ResNet-9 and airbench the global max
        pool, in AlexNet the outputs of the second hidden dense layer.
    """
    return network.get_layer("logits").input


def network_of(model: keras.Model) -> keras.Model:
    """Returns the network, from normalized images, inside a model from pixels to logits.

    Args:
        model: as ``training.build.build_model`` makes it, with the network as a layer.
    """
    import keras

    return next(layer for layer in model.layers if isinstance(layer, keras.Model))


def option_names(name: str) -> list[str]:
    """Returns the names of the options that ``build`` takes for the model called ``name``."""
    return _options(_models()[name])


def __getattr__(name: str) -> Any:
    if name == "MODELS":
        return _models()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _models() -> dict[str, Callable[..., keras.Model]]:
    from imagenet_fast.models.airbench import AIRBENCH_SIZES, airbench
    from imagenet_fast.models.alexnet import alexnet_bn
    from imagenet_fast.models.amoebanet import AMOEBANET_VARIANTS, amoebanet
    from imagenet_fast.models.resnet import CIFAR_DEPTHS, IMAGENET_DEPTHS, cifar_resnet, resnet
    from imagenet_fast.models.resnet9 import resnet9

    return {
        **{f"resnet{depth}": functools.partial(resnet, depth) for depth in IMAGENET_DEPTHS},
        **{f"resnet{depth}": functools.partial(cifar_resnet, depth) for depth in CIFAR_DEPTHS},
        "alexnet_bn": alexnet_bn,
        "resnet9": resnet9,
        **{f"airbench{size}": functools.partial(airbench, size) for size in AIRBENCH_SIZES},
        **{f"amoebanet_{v}": functools.partial(amoebanet, v) for v in AMOEBANET_VARIANTS},
    }


def _options(builder: Callable[..., keras.Model]) -> list[str]:
    """Returns the names of a builder's keyword-only arguments, and those of batch norm."""
    from imagenet_fast.models.batch_norm import norm_arguments

    functions = (builder, norm_arguments)
    parameters = [p for f in functions for p in inspect.signature(f).parameters.values()]
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]


if sys.modules.get("keras"):
    _models()
