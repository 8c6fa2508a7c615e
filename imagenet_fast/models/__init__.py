"""Image classifiers: Keras models that turn normalized images into float32 logits.

``build`` makes a model by name, ``load`` reads one that was saved; ``MODELS`` is the table of
names. The functions behind it, ``resnet.resnet``, ``resnet.cifar_resnet``, ``alexnet.alexnet_bn``,
``resnet9.resnet9``, ``airbench.airbench`` and ``amoebanet.amoebanet``, can be called directly. The
last layer of each model that has weights is dense and called ``logits``; ``features`` is what feeds
it.

TensorFlow is imported when the table is first read, not when this package is: flags are checked
against ``options.MODEL_NAMES`` without it.
"""

from __future__ import annotations

import functools
import inspect
import os
from typing import TYPE_CHECKING, Any

from imagenet_fast.base.errors import UserError, nearest
from imagenet_fast.models.options import MODEL_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable

    import tf_keras as keras

    MODELS: dict[str, Callable[..., keras.Model]]

__all__ = ["MODELS", "MODEL_NAMES", "build", "features", "load", "network_of", "option_names"]


def build(
    name: str,
    /,
    num_classes: int,
    input_shape: tuple[int | None, int | None, int],
    **options: Any,
) -> keras.Model:
    """Makes the model called ``name``, un-compiled, under the global mixed-precision policy.

    Args:
        name: one of ``MODEL_NAMES``; by position only, because ``name=`` is a model's own option.
        num_classes: number of logits.
        input_shape: (height, width, channels) of one image.
        **options: keyword arguments of the model's own function.

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
    own = _options(models[name])
    for option in options:
        if option not in own:
            others = [other for other in models if option in _options(models[other])]
            raise UserError(
                f"model {name!r} has no option {option!r}"
                + (
                    f"; the models that have it are {', '.join(others)}"
                    if others
                    else f"{nearest(option, own)}; its options are {', '.join(own)}"
                )
            )
    return models[name](num_classes, input_shape, **options)


def load(path: str | os.PathLike[str]) -> keras.Model:
    """Reads a model that its ``save`` wrote to a ``.keras`` file, uncompiled.

    It is ``keras.models.load_model``, which by itself does not know the layers of this package.

    Args:
        path: the file.

    Raises:
        UserError: if it cannot be read.
    """
    import tf_keras as keras

    import imagenet_fast.layers  # noqa: F401

    _models()
    try:
        return keras.models.load_model(path, compile=False)
    except (OSError, TypeError, ValueError) as error:
        raise UserError(f"cannot read a model from {os.fspath(path)}: {error}") from error


def features(network: keras.Model) -> Any:
    """Returns what feeds the last dense layer of a model that ``build`` made.

    Returns:
        Keras' symbolic tensor, float [batch, channels], from which a ``keras.Model`` can be made;
        of ResNets and AmoebaNets the average over the last feature map, of ResNet-9 and airbench
        its maximum, of AlexNet the outputs of its second hidden dense layer.
    """
    return network.get_layer("logits").input


def network_of(model: keras.Model) -> keras.Model:
    """Returns the network inside of a model from pixels to logits, as ``build_model`` makes them.

    Args:
        model: with a layer that is a model itself: the network, which takes normalized images.
    """
    import tf_keras as keras

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
    """The names of a builder's keyword-only arguments."""
    parameters = inspect.signature(builder).parameters.values()
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
